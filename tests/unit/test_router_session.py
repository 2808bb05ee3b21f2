"""One SubmitPrompts stream against a reader that is slow."""

import asyncio
import contextlib

from headwater_router.config import RouterConfig
from headwater_router.service import RouterService
from headwater_router.session import MAX_UNSENT, Session

from headwater.router.v1.router_pb2 import Prompt, SubmitPromptsRequest


async def test_a_reader_that_is_slow_stops_the_input_so_that_memory_is_bounded():
    read = 0

    async def requests():
        nonlocal read
        for _ in range(3 * MAX_UNSENT):
            read += 1
            yield SubmitPromptsRequest(prompt=Prompt(text=""))  # each gives one event: an error

    session = Session(RouterService(RouterConfig())._prompts, requests())
    async with asyncio.timeout(20), contextlib.aclosing(session.events()) as events:
        await anext(events)
        for _ in range(10 * MAX_UNSENT):
            await asyncio.sleep(0)
        assert MAX_UNSENT <= read <= MAX_UNSENT + 2
        assert 1 + len([event async for event in events]) == read == 3 * MAX_UNSENT
