"""Limits of the gateway's server: connections, header size, idle time, event streams, TLS."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from quartet.gateway import server
from quartet.gateway.routes import events
from quartet.rpc.security.certificates import Authority
from tests.gateway.live_runs import eventually
from tests.gateway.serving import TIMEOUT, TOKEN, Gateway, Stream, commit, create_run, serving

VIEWER_TOKEN = "the-token-of-the-viewer"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    create_run(folder, steps=1)
    return folder


@pytest.fixture(scope="module")
def gateway(runs: Path) -> Iterator[Gateway]:
    with serving(runs, viewer_token=VIEWER_TOKEN) as gateway:
        yield gateway


def connect(gateway: Gateway, sent: bytes = b"") -> socket.socket:
    host, _, port = gateway.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server; return whether it closed the connection instead of sending something."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def session_status(gateway: Gateway) -> int:
    """Return the status of a request on a new connection."""
    connection = http.client.HTTPConnection(gateway.address, timeout=TIMEOUT)
    connection.request("GET", "/api/v1/session", headers={"authorization": f"Bearer {TOKEN}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_connections_above_the_limit_get_503_until_others_close(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    with serving(runs) as gateway:
        with ExitStack() as open_connections:
            for _ in range(8):
                open_connections.enter_context(connect(gateway))
            eventually(lambda: session_status(gateway), lambda status: status == 503)
        eventually(lambda: session_status(gateway), lambda status: status == 200)


def test_incomplete_headers_above_the_limit_get_400(gateway: Gateway) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Padding: "
    with connect(gateway, head + b"x" * (server.MAX_INCOMPLETE_HEADER_BYTES + 1)) as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400


def test_a_malformed_request_gets_400(gateway: Gateway) -> None:
    with connect(gateway, b"nonsense\r\n\r\n") as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400


def test_an_idle_connection_is_closed_after_the_keep_alive_time_but_a_stream_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 1)
    files = create_run(tmp_path, steps=1)
    request = f"GET /api/v1/session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with serving(tmp_path) as gateway, gateway.stream("some") as stream:
        next(iter(stream))
        with connect(gateway, request.encode()) as connection:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert json.loads(response.read())["access"] == "operator"
            assert is_closed(connection)
        commit(files, 2)
        stream.until("step", step=2)


def test_event_streams_per_token_are_limited_and_commands_are_not(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS", 2)
    path = "/runs/some/events"
    with Stream(gateway.address, "some") as first, Stream(gateway.address, "some") as other:
        for stream in (first, other):
            next(iter(stream))
        refused = gateway.client.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "event streams" in refused.json()["detail"]
        assert gateway.client.post("/runs/some/pause").status_code == 409
        with gateway.client.stream("GET", path, headers={"Authorization": f"Bearer {VIEWER_TOKEN}"}) as viewers:
            assert viewers.status_code == 200

    def can_open() -> bool:
        with gateway.client.stream("GET", path) as response:
            return response.status_code == 200

    eventually(can_open, bool)


def test_with_a_certificate_only_https_is_served(tmp_path: Path) -> None:
    create_run(tmp_path, steps=1)
    Authority(timedelta(days=1)).issue(tmp_path / "tls", ["127.0.0.1", "localhost"])
    with serving(tmp_path, certificate=tmp_path / "tls/tls.crt", key=tmp_path / "tls/tls.key") as gateway:
        assert gateway.client.get("/session").status_code == 200
        with connect(gateway, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as plain:
            assert b"HTTP" not in plain.recv(1024)
            assert is_closed(plain)
