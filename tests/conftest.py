"""Fixtures of several folders of tests, and the profiles of Hypothesis."""

from __future__ import annotations

import contextlib
import gc
import os
import socketserver
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.system.compute_environment import set_cpu_environment
from quartet.telemetry.logs import configure_logs

# Tests start child processes from a process that uses gRPC. The fork handlers of gRPC could abort the child. gRPC reads this
# variable at its first use.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Tests neither use nor fill the cache of the user. Parallel processes of a session share one.
if os.path.basename(os.environ.get("QUARTET_CACHE", "")).partition("_")[0] != "quartet-tests":
    _CACHE = tempfile.TemporaryDirectory(prefix="quartet-tests_")
    os.environ["QUARTET_CACHE"] = _CACHE.name
# The models of the tests are too small for several threads, and waiting threads keep all cores busy. Set this before the import
# of torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
set_cpu_environment(os.environ)

# The imports of the tests create millions of objects that stay. Searches for garbage among them would take a part of all tests.
gc.disable()

pytest_plugins = ["tests.durations"]

with contextlib.suppress(ModuleNotFoundError):  # The environments of other engines do not have it.
    from hypothesis import settings

    settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
    settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
    settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the workers of a run of all tests from a process that has the libraries. A part may need none of them."""
    config = session.config
    if config.args_source is config.ArgsSource.TESTPATHS and len(getattr(config.option, "tx", None) or []) > 1:
        from tests.forked_workers import fork_workers

        fork_workers()


def pytest_collection_finish() -> None:
    """Exclude the objects so far from garbage collection, and start it, for larger portions than by default."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _logs() -> None:
    """Configure logs like the product does, so that standard output contains only the output of commands."""
    configure_logs("tests")


@pytest.fixture(scope="session", autouse=True)
def _no_flush() -> Iterator[None]:
    """Do not wait for the disk: no machine loses its power during a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _servers_stop_at_once() -> Iterator[None]:
    """Let HTTP servers, such as those of metrics, notice in less than the usual half a second that they must stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.02,))
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> Iterator[None]:
    """Give HTTP clients one TLS context. Each would read the certificates of the system, which takes longer than most calls."""
    try:
        from httpx2._transports import default
    except ModuleNotFoundError:  # The environments of other engines do not have it.
        yield
        return
    create, contexts = default.create_ssl_context, dict[tuple[object, ...], ssl.SSLContext]()

    def create_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return create(verify, cert, trust_env)
        key = (trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        if key not in contexts:
            contexts[key] = create(verify, cert, trust_env)
        return contexts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", create_once)
        yield


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis for this test session. Tests use different run names, so that they do not share data."""
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder / "data", folder / "redis.log") as server:
        yield server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    """A client of the session's Redis."""
    client = connect(redis_url)
    yield client
    client.close()
