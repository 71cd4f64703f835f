"""Clients that are wrong, slow or too many: clear errors, bounded memory, and no effect on other sessions."""

from __future__ import annotations

import gc
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.trajectory import Outcome
from quartet.services.generator.sessions import app, bodies, connections
from quartet.services.generator.sessions.app import SessionServer
from tests.services.generator.sessions.agent_requests import fine_after, post, user
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


class Resources:
    """Memory of this process, which has the server, its clients and its engine."""

    FIXED_MIB, EACH_KIB = 100, 40

    def __init__(self) -> None:
        gc.collect()
        self._before = self._mib()

    def check(self, count: int) -> None:
        """Check that ``count`` sessions or connections take little memory."""
        used, most = self._mib() - self._before, self.FIXED_MIB + count * self.EACH_KIB / 1024
        print(f"{count}: {used:.1f} MiB")
        assert used < most, f"{used:.0f} MiB for {count}, expected less than {most:.0f}"

    def _mib(self) -> float:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A client that agents share: a new one takes longer than a request."""
    with httpx.Client(limits=httpx.Limits(max_connections=64)) as result:
        yield result


@pytest.fixture
def resources() -> Resources:
    return Resources()


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


def works(start: AgentRun, client: Any = httpx) -> bool:
    return post(start, [user("hello")], client=client).status_code == 200


@pytest.mark.parametrize("header", [None, "", "Basic abc", "Bearer", "Bearer wrong", "Bearer \u00e4"])
def test_without_a_key_nothing_is_read(server: SessionServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.post(f"http://{server.address}{CHAT}", content=b"not json", headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert httpx.get(f"http://{server.address}/v1/models", headers=headers).status_code == 401


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


@pytest.mark.parametrize("prompt", [[2**63], [1, 2**31], [-1], [[1], [2**64]]])
def test_token_ids_that_no_model_has_are_an_error_of_the_client(agent_run: AgentRun, prompt: list[Any]) -> None:
    response = httpx.post(
        f"{agent_run.base_url}/completions",
        json={"model": agent_run.model, "prompt": prompt},
        headers={"authorization": f"Bearer {agent_run.api_key}"},
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert works(agent_run)


def test_the_half_open_requests_of_one_agent_do_not_stop_the_others(scripted: Scripted, run: str) -> None:
    rig, sent, done = scripted(lambda prompt: "fine"), threading.Event(), threading.Event()

    def agent(start: AgentRun) -> AgentResult:
        if start.session.split("/")[2] == "0":
            with ExitStack() as stack:
                for _ in range(33):
                    connection = stack.enter_context(connect(rig.server))
                    connection.sendall(head(start.api_key, bodies.MAX_BODY_BYTES) + b"{")
                wait_until(lambda: max(rig.server._waiting.values(), default=0) == 33)
                sent.set()
                assert done.wait(20)
            return AgentResult(0.0)
        assert sent.wait(20)
        try:
            assert works(start)
        finally:
            done.set()
        return AgentResult(1.0)

    first, second = rig.play(rig.batch(run, episodes=2), agent)
    assert {first.outcome, second.outcome} == {Outcome.OK, Outcome.ENVIRONMENT_ERROR}, "the first one got no answer"


def test_a_small_body_of_unknown_size_takes_little_of_the_budget(
    scripted: Scripted, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    rig, statuses = scripted(fine_after(go)), list[int]()
    rig.max_branches = 40

    def agent(start: AgentRun) -> AgentResult:
        body = json.dumps({"model": start.model, "messages": [{"role": "user", "content": "one"}]}).encode()

        def post() -> None:
            headers = {"authorization": f"Bearer {start.api_key}"}
            url = f"{start.base_url}/chat/completions"
            statuses.append(httpx.post(url, content=iter([body]), headers=headers, timeout=30).status_code)

        threads = [threading.Thread(target=post) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(rig.server._budget._held.values()) == 40 * len(body))
        go.set()
        for thread in threads:
            thread.join()
        return AgentResult(1.0)

    rig.checked(rig.batch(run, max_turns=50), agent)
    assert statuses == [200] * 40


def test_half_open_requests_end_and_hold_no_budget(
    agent_run: AgentRun, server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "DISCARD_SECONDS", 0.1)
    # More than the budget for all bodies.
    stalled = [connect(server) for _ in range(40)]
    for connection in stalled:
        connection.sendall(head(agent_run.api_key, bodies.MAX_BODY_BYTES) + b"{")
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
    rig = scripted(fine_after(go))

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


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_many_sessions_that_are_open_at_once_take_little_memory(
    scripted: Scripted, run: str, count: int, client: httpx.Client, resources: Resources
) -> None:
    rig = scripted(lambda prompt: "fine and good")
    rig.max_open = count
    all_open = threading.Event()

    def agent(start: AgentRun) -> AgentResult:
        assert all_open.wait(600)
        messages = [{"role": "user", "content": "x" * 1000}]
        for _ in range(3):
            answer = post(start, messages, client=client, timeout=60)
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        return AgentResult(1.0)

    def watch() -> None:
        wait_until(lambda: len(rig.server._sessions) == count, 600)
        all_open.set()

    thread = threading.Thread(target=watch)
    thread.start()
    result = rig.checked(rig.batch(run, count, limit=200), agent)
    thread.join()
    assert len(result) == count
    assert {len(item.turns) for item in result} == {3}
    assert not rig.server._sessions
    resources.check(count)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.slow
def test_of_many_sessions_one_after_the_other_only_some_keys_are_kept(
    scripted: Scripted,
    run: str,
    count: int,
    client: httpx.Client,
    resources: Resources,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = count // 2
    monkeypatch.setattr(app, "MAX_ENDED_KEYS", kept)
    rig = scripted(lambda prompt: "fine")
    rig.max_open = 1

    def agent(start: AgentRun) -> AgentResult:
        assert works(start, client)
        return AgentResult(1.0)

    assert len(rig.checked(rig.batch(run, count), agent)) == count
    server, agents = rig.server, rig.agents
    assert agents is not None
    assert (len(server._sessions), len(server._ended), len(server._waiting), len(server._tasks)) == (0, kept, 0, 0)
    for start, expected in ((agents.runs[0], "Wrong API key"), (agents.runs[-1], "has ended")):
        answer = httpx.get(f"{start.base_url}/models", headers={"authorization": f"Bearer {start.api_key}"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
        assert expected in error["message"]
    resources.check(count)


def test_answers_do_not_wait_for_acknowledgements(server: SessionServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer_of(client)[0] == 401
        (connection,) = server._server.server_state.connections
        end = connection.transport.get_extra_info("socket")
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture(params=[32, pytest.param(app.MAX_CONNECTIONS, marks=pytest.mark.slow)])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Limit of connections of a server that is started after this fixture."""
    result: int = request.param
    # Both ends of the connections are files of this process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    monkeypatch.setattr(app, "MAX_CONNECTIONS", result)
    yield result
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_without_a_request_keep_no_agent_out(
    limit: int, agent_run: AgentRun, server: SessionServer, resources: Resources
) -> None:
    """10,000 in the slow test."""
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(server)) for _ in range(min(10_000, 10 * limit))]
        assert works(agent_run)
        # The newest ones are open, and get an answer to a request without a key.
        wait_until(lambda: len(server._server.server_state.connections) <= limit)
        assert is_closed(opened[0])
        opened[-1].sendall(head("wrong", 2) + b"{}")
        assert answer_of(opened[-1])[0] == 401
        resources.check(limit)
    assert works(agent_run)


def test_a_connection_above_the_limit_is_told_so_if_all_others_have_requests(
    limit: int, agent_run: AgentRun, server: SessionServer, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", limit + 1)
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(limit)]
        for connection in busy:
            connection.sendall(head(agent_run.api_key, 1000) + b"{")
        wait_until(lambda: sum(server._waiting.values()) == limit)
        for _ in range(20):
            response = httpx.post(f"{agent_run.base_url}/chat/completions", json={"model": "m" * 10_000})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (
                503,
                "overloaded",
                "server_error",
            )
        resources.check(limit)
    wait_until(lambda: not server._waiting)
    assert works(agent_run)
