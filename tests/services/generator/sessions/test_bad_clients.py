"""Clients that are wrong, slow or too many: clear errors, bounded memory, and no effect on other sessions."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quartet.contract.agent import AgentResult, AgentRun
from quartet.services.generator.sessions import app, connections
from quartet.services.generator.sessions.app import SessionServer
from tests.services.generator.sessions.harness import Rig, Script, wait_until

Scripted = Callable[[Script], Rig]
CHAT = "/v1/chat/completions"


def connect(server: SessionServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(key: str, length: int | str) -> bytes:
    size = f"content-length: {length}" if isinstance(length, int) else f"transfer-encoding: {length}"
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n{size}\r\n\r\n"
    ).encode()


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Read a response up to the end of the connection or of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    headers, _, body = data.partition(b"\r\n\r\n")
    size = next(
        int(line.split(b":")[1]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < size:
        body += connection.recv(65536)
    return int(headers.split()[1]), json.loads(body)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(65536) == b""
    except ConnectionResetError:
        return True


def memory_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError


@pytest.fixture
def agent_run(scripted: Scripted, run: str) -> Iterator[AgentRun]:
    """An agent that stays open during a test; its policy answers at once."""
    started: list[AgentRun] = []
    opened, done = threading.Event(), threading.Event()
    rig = scripted(lambda prompt: "fine")

    def agent(start: AgentRun) -> AgentResult:
        started.append(start)
        opened.set()
        assert done.wait(120)
        return AgentResult(1.0)

    thread = threading.Thread(target=lambda: rig.play(rig.batch(run, max_turns=1000), agent))
    thread.start()
    assert opened.wait(20)
    yield started[0]
    done.set()
    thread.join()


def works(start: AgentRun) -> bool:
    response = httpx.post(
        f"{start.base_url}/chat/completions",
        json={"model": start.model, "messages": [{"role": "user", "content": "hello"}]},
        headers={"authorization": f"Bearer {start.api_key}"},
        timeout=20,
    )
    return response.status_code == 200


@pytest.mark.parametrize("header", [None, "", "Basic abc", "Bearer", "Bearer wrong", "Bearer \u00e4"])
def test_without_a_key_nothing_is_read(server: SessionServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.post(f"http://{server.address}{CHAT}", content=b"not json", headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert httpx.get(f"http://{server.address}/v1/models", headers=headers).status_code == 401


def test_beyond_the_limit_of_connections_a_client_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_CONNECTIONS", 1)
    server = SessionServer("127.0.0.1:0")
    try:
        with connect(server) as first, connect(server) as second:
            for connection, status in ((second, 503), (first, 401)):
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                code, body = answer_of(connection)
                assert code == status
            assert body["error"]["code"] == "invalid_api_key"
            assert is_closed(second)
        with connect(server) as first, connect(server) as second:
            second.sendall(head("x", 0))
            assert answer_of(second)[1]["error"]["code"] == "overloaded"
    finally:
        server.close()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/docs", "/openapi.json"])
def test_other_paths_do_not_exist(server: SessionServer, path: str) -> None:
    response = httpx.get(f"http://{server.address}{path}")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"model": 1}'])
def test_a_malformed_body_is_an_error_of_the_client(agent_run: AgentRun, body: bytes) -> None:
    for path in ("chat/completions", "completions"):
        response = httpx.post(
            f"{agent_run.base_url}/{path}", content=body, headers={"authorization": f"Bearer {agent_run.api_key}"}
        )
        assert response.status_code == 400
        assert response.json()["error"]["message"]
    assert works(agent_run)


@pytest.mark.parametrize("key", ["right", "wrong"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_10_mb_is_refused_and_its_client_reads_why(agent_run: AgentRun, key: str, chunked: bool) -> None:
    message = {"role": "user", "content": "x" * 10_000_000}
    body = json.dumps({"model": agent_run.model, "messages": [message]}).encode()
    parts = (body[start : start + 65536] for start in range(0, len(body), 65536)) if chunked else body
    response = httpx.post(
        f"{agent_run.base_url}/chat/completions",
        content=parts,
        headers={"authorization": f"Bearer {agent_run.api_key if key == 'right' else key}"},
        timeout=20,
    )
    assert response.status_code == (413 if key == "right" else 401)
    assert response.json()["error"]["code"] == ("request_too_large" if key == "right" else "invalid_api_key")
    assert works(agent_run)


def test_a_large_body_below_the_limit_is_an_error_of_the_context(agent_run: AgentRun) -> None:
    message = {"role": "user", "content": "word " * 1_000_000}
    response = httpx.post(
        f"{agent_run.base_url}/chat/completions",
        json={"model": agent_run.model, "messages": [message]},
        headers={"authorization": f"Bearer {agent_run.api_key}"},
        timeout=60,
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_half_open_requests_end_and_hold_no_budget(
    agent_run: AgentRun, server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(app, "DISCARD_SECONDS", 0.1)
    # More than the budget for all bodies.
    stalled = [connect(server) for _ in range(40)]
    for connection in stalled:
        connection.sendall(head(agent_run.api_key, app.MAX_BODY_BYTES) + b"{")
    assert works(agent_run)
    for connection in stalled:
        status, body = answer_of(connection)
        assert (status, body["error"]["code"]) == (408, "timeout")
        connection.close()


def test_headers_that_do_not_arrive_end_the_connection(
    agent_run: AgentRun, server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    silent, partial, reused = connect(server), connect(server), connect(server)
    partial.sendall(b"POST /v1/chat/comple")
    reused.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer_of(reused)[0] == 401
    reused.sendall(b"GET /v1/mod")
    for connection in (silent, partial, reused):
        assert is_closed(connection)
        connection.close()
    assert works(agent_run)


def test_a_client_that_does_not_read_is_disconnected(
    scripted: Scripted, run: str, server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # More than the buffers of both sockets hold.
    rig = scripted(lambda prompt: "fine" if "hello" in prompt else "word " * 40_000)

    def agent(start: AgentRun) -> AgentResult:
        connection = connect(server)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"model": start.model, "messages": [{"role": "user", "content": "long"}]})
        connection.sendall(head(start.api_key, len(body)) + body.encode())
        # Nothing is read, and another request of the session is answered meanwhile.
        assert works(start)
        wait_until(lambda: not server._waiting and len(server._server.server_state.tasks) == 0)
        connection.close()
        return AgentResult(1.0)

    rig.served = replace(rig.served, max_sequence_tokens=0)
    [result] = rig.checked(rig.batch(run, limit=200_000), agent)
    # The long answer was not delivered.
    assert len(result.turns) == 1


def test_requests_of_a_session_at_once_are_limited(
    scripted: Scripted, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", 3)
    go = threading.Event()

    def script(prompt: str) -> str:
        assert go.wait(20)
        return "fine"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        results: list[bool] = []
        threads = [threading.Thread(target=lambda: results.append(works(start))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(rig.server._waiting.values()) == 3)
        response = httpx.post(
            f"{start.base_url}/chat/completions", json={}, headers={"authorization": f"Bearer {start.api_key}"}
        )
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        go.set()
        for thread in threads:
            thread.join()
        assert results == [True] * 3
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_sessions_take_little_memory(scripted: Scripted, run: str, count: int) -> None:
    rig = scripted(lambda prompt: "fine and good")
    rig.max_open = count
    sizes: list[float] = []

    def agent(start: AgentRun) -> AgentResult:
        # 64 at once: each of the harness's agents has a thread.
        headers = {"authorization": f"Bearer {start.api_key}"}
        messages = [{"role": "user", "content": "x" * 1000}]
        with httpx.Client(headers=headers, timeout=60) as client:
            for _ in range(3):
                body = {"model": start.model, "messages": messages}
                answer = client.post(f"{start.base_url}/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        sizes.append(memory_mib())
        return AgentResult(1.0)

    gc.collect()
    before, start = memory_mib(), time.monotonic()
    result = rig.checked(rig.batch(run, count, limit=200), agent)
    assert len(result) == count
    assert {len(item.turns) for item in result} == {3}
    assert max(sizes) - before < 400, f"{max(sizes) - before:.0f} MiB after {time.monotonic() - start:.0f} s"
    assert not rig.server._sessions
