"""Whoever only holds connections open keeps nobody out, and is told so in the way in which everything is told."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quartet.gateway import connections
from quartet.gateway.access import SECURITY_HEADERS
from quartet.gateway.http_errors import MEDIA_TYPE
from quartet.gateway.routes import events
from tests.gateway.serving import PATIENCE, TOKEN, Gateway, Stream, a_run, commit, serving
from tests.gateway.test_live import eventually

VIEWER = "only-for-looking-at-things"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    a_run(tmp_path, steps=1)
    with serving(tmp_path, viewer_token=VIEWER) as found:
        yield found


def connected(gateway: Gateway, sent: bytes = b"") -> socket.socket:
    host, _, port = gateway.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other side says something, which is to be that it says no more."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def session(gateway: Gateway) -> tuple[int, Any, Any]:
    """Asked on a connection of its own."""
    connection = http.client.HTTPConnection(gateway.address, timeout=PATIENCE)
    connection.request("GET", "/api/v1/session", headers={"authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body, response.headers


@pytest.mark.parametrize("limit", ["MOST", "MAX_OF_AN_ADDRESS"])
def test_idle_connections_make_way(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(connections, limit, 4)
    with ExitStack() as open_ones:
        idle = [open_ones.enter_context(connected(gateway, b"GET / HTTP/1.1\r\n")) for _ in range(12)]
        assert session(gateway)[0] == 200
        assert all(is_closed(connection) for connection in idle[:8])


def test_answers_that_nobody_reads_make_way(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    asked = b"GET /static/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as open_ones:
        for _ in range(4):
            connection = open_ones.enter_context(connected(gateway, asked * 4))
            # Once its answer begins, the request is in hand.
            assert connection.recv(1) == b"H"
        assert session(gateway)[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/v1/runs/some/rollback HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_come_is_not_waited_for_but_a_stream_is(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    with gateway.stream("some") as stream, connected(gateway, sent) as slow:
        next(iter(stream))
        assert is_closed(slow)
        commit(a_run(tmp_path, "some"), 2)
        stream.until("step", step=2)


def test_where_all_are_in_use_that_is_said_as_a_problem(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 2)
    with gateway.stream("some") as one, gateway.stream("some") as other:
        for stream in (one, other):
            next(iter(stream))
        status, body, headers = session(gateway)
        assert (status, headers["content-type"]) == (503, MEDIA_TYPE)
        assert "too many connections" in body["detail"]
        assert SECURITY_HEADERS.items() <= dict(headers).items()


def test_what_is_no_http_is_told_so_as_a_problem(gateway: Gateway) -> None:
    with connected(gateway, b"nonsense\r\n\r\n") as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, response.headers["content-type"]) == (400, MEDIA_TYPE)
        assert SECURITY_HEADERS.items() <= dict(response.headers).items()
        assert json.loads(response.read())["status"] == 400


def test_streams_of_one_token_leave_room(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS", 2)
    path = "/runs/some/events"
    with Stream(gateway.address, "some") as one, Stream(gateway.address, "some") as other:
        for stream in (one, other):
            next(iter(stream))
        refused = gateway.client.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "event streams" in refused.json()["detail"]
        assert gateway.client.post("/runs/some/pause").status_code == 409
        with gateway.client.stream("GET", path, headers={"Authorization": f"Bearer {VIEWER}"}) as viewers:
            assert viewers.status_code == 200

    def opens() -> bool:
        with gateway.client.stream("GET", path) as answer:
            return answer.status_code == 200

    eventually(opens, bool)
