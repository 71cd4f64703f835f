"""Errors of a failing Redis connection, without secrets, and the monitor of the connection."""

from __future__ import annotations

import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from quartet.buffer import connection
from quartet.buffer.connection import ConnectionMonitor, connect, connect_at_start
from quartet.buffer.embedded_redis import EmbeddedRedis, find_server
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.rpc.security.certificates import Authority
from quartet.rpc.service_channel import accepts_connections
from quartet.system.child_processes import tied_to_parent
from tests.buffer.samples import trajectory
from tests.faults.proxy import Proxy
from tests.waiting import LIMIT, wait_until


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@127.0.0.1:1/0",
        "redis://user:s3:cr3t@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=s3cret",
        "unix:///nowhere/redis.sock?password=s3cret",
    ],
)
def test_the_error_of_an_unreachable_server_names_a_remedy_and_no_password(url: str) -> None:
    with pytest.raises(ServiceUnavailable) as error:
        connect(url)
    message = str(error.value)
    assert message.startswith("rollout buffer at ")
    assert "unreachable" in message
    assert "start Redis there, correct buffer.url" in message
    assert not {"s3", "cr3t", "s3cret"} & set(message.replace(":", " ").replace("@", " ").replace("=", " ").split())


@pytest.mark.parametrize("url", ["nonsense", "http://h", "redis://:s3cret@host:port/0", "redis://:s3cret/x@host:1/0"])
def test_a_malformed_url_is_refused_with_the_key_and_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^buffer\.url .*expected redis://HOST:PORT/DB") as error:
        connect(url)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("url", ["redis://:***@127.0.0.1:1/0", "unix:///nowhere/redis.sock?password=***"])
def test_a_url_with_a_masked_password_explains_how_to_set_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"stars replace a password, .* --set buffer\.url=URL") as error:
        connect(url)
    assert str(error.value).startswith(f"buffer.url {url}: ")


@pytest.fixture
def plain_port(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis over TCP with a password and without TLS."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", "right"]
    process = subprocess.Popen(tied_to_parent(command), cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: accepts_connections(f"127.0.0.1:{port}"))
        yield port
    finally:
        process.kill()
        process.wait()


def test_a_server_without_tls_is_reported_immediately_if_the_url_requires_tls(
    plain_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PING_TIMEOUT", 0.2)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"rediss://me:\*\*\*@.* does not use TLS; use redis:// in buffer\.url"):
        connect(f"rediss://me:s3cret@127.0.0.1:{plain_port}/0")  # pragma: allowlist secret - an example
    assert time.monotonic() - start < 5
    connect(f"redis://:right@127.0.0.1:{plain_port}/0").close()


@pytest.fixture(params=["client certificate", "no client certificate"])
def tls_port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The port of a TLS server, which stands in for a Redis with TLS. The embedded server does not support TLS."""
    Authority(timedelta(days=1)).issue(tmp_path / "redis", ["localhost"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "redis/ca.crt")
    context.load_cert_chain(tmp_path / "redis/tls.crt", tmp_path / "redis/tls.key")
    context.verify_mode = ssl.CERT_REQUIRED if request.param == "client certificate" else ssl.CERT_NONE

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True) as encrypted:
                encrypted.recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def test_a_server_with_tls_is_reported_if_the_url_has_no_tls(tls_port: int) -> None:
    with pytest.raises(ConfigError, match=r"uses TLS; use rediss:// in buffer\.url"):
        connect(f"redis://127.0.0.1:{tls_port}/0")


def test_wrong_or_missing_credentials_are_a_config_error(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        connect(server.url).config_set("requirepass", "right")
        connect(f"{server.url}?password=right").close()
        for url in (f"{server.url}?password=s3cret", server.url):
            with pytest.raises(ConfigError, match=r"rejected the credentials .*correct buffer\.url") as error:
                connect(url)
            assert "s3cret" not in str(error.value)


def test_a_lost_server_is_an_error_and_not_an_empty_stream(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        stream = RolloutStream(connect(server.url), server.url, "run")
        stream.reset()
    for operation in (lambda: stream.read(1, 0.01), lambda: stream.append([trajectory("run", 1)]), stream.depth):
        with pytest.raises(ServiceUnavailable, match="rollout buffer at unix://"):
            operation()


@pytest.mark.parametrize("command", ["append", "load"])
def test_a_connection_is_lost_from_a_failed_command_until_the_server_responds(redis_url: str, command: str) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        url = f"redis://{proxy.address}/0"
        client = connect(url)
        monitor = ConnectionMonitor(client, url)
        stream = RolloutStream(client, url, "link", monitor.mark_lost)
        store = ExperienceStore(client, url, "link", monitor.mark_lost)
        operation = {"append": lambda: stream.append([trajectory("link", 1)]), "load": lambda: store.load(1)}[command]
        assert not monitor.is_lost()
        proxy.reset()
        assert not monitor.is_lost()
        for _ in range(2):
            with pytest.raises(ServiceUnavailable):
                operation()
            assert monitor.is_lost()
        proxy.heal()
        wait_until(lambda: not monitor.is_lost())
        stream.append([trajectory("link", 1)])
        stream.reset()


@pytest.mark.filterwarnings("error")
def test_a_server_that_rejects_the_credentials_counts_as_reachable(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        client = connect(server.url)
        monitor = ConnectionMonitor(client, server.url)
        client.config_set("requirepass", "right")
        client.connection_pool.disconnect()
        monitor.mark_lost()
        wait_until(lambda: not monitor.is_lost())


def test_a_service_that_starts_waits_for_a_server_that_was_killed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server, ThreadPoolExecutor() as executor:
        server.process.kill()
        server.process.wait()
        with capture_logs() as logs:
            connecting = executor.submit(connect_at_start, server.url, LIMIT)
            wait_until(lambda: logs)
            server.start()
            client = connecting.result(LIMIT)
        assert client.ping()
        client.close()
    [entry] = logs
    assert entry["event"] == "waiting for the rollout buffer"
    assert "the embedded server has ended; see redis.log" in entry["error"]


def test_a_service_that_starts_does_not_wait_longer_than_a_load_may_take() -> None:
    with pytest.raises(ServiceUnavailable, match="unreachable"):
        connect_at_start("redis://127.0.0.1:1/0", load_seconds=0.05)
