"""What several folders of tests share: a real embedded Redis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.telemetry.logs import configure_logs

# Tests fork from a process that speaks gRPC, to run something else: gRPC, which looks here when it is first used, is not to be
# mended in the fork, where that may end it.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


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
