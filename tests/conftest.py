"""What several folders of tests share: a real embedded Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.embedded import EmbeddedRedis
from quartet.telemetry.logs import configure_logs


@pytest.fixture(scope="session", autouse=True)
def _logs() -> None:
    """Logs go where the product's do: what a command prints, and a test reads, is on standard output."""
    configure_logs("tests")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis of this test session's own. Tests keep apart by the names of their runs."""
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder / "data", folder / "redis.log") as server:
        yield server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    """A client of that Redis."""
    client = connect(redis_url)
    yield client
    client.close()
