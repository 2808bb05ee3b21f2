"""The pages of the dashboard. It reads; it decides nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader

from headwater_dashboard.sources import REWARD, Sources, curve

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)


def create_app(router: str, trainer: str) -> FastAPI:
    """The application, for services at these addresses (host:port); they need not be up yet."""
    sources: list[Sources] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sources.append(Sources(router, trainer))
        following = asyncio.create_task(sources[0].follow_runs())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await sources.pop().close()

    app = FastAPI(title="Headwater", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process lives; it says nothing of the services it looks at."""
        return {"status": "ok"}

    @app.get("/api/status")
    async def status() -> dict[str, Any]:
        """Router status, run, steps and notices."""
        return await sources[0].snapshot()

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """The page; its script replaces the main part every two seconds."""
        return _TEMPLATES.get_template("index.html").render(body=await body())

    @app.get("/body", response_class=HTMLResponse)
    async def body() -> str:
        """The main part of the page."""
        state = await sources[0].snapshot()
        steps = state["trainer"]["steps"]
        return _TEMPLATES.get_template("body.html").render(**state, points=curve(steps, 600, 160), reward=REWARD)

    return app
