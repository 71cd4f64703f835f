"""Environments of OpenEnv servers: episodes, and faults that are outcomes and never rewards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib.openenv.tests.servers import Handler, HTTPServer, WebSocketServer, send
from quartet.config.environment import EnvironmentConfig
from quartet.contract.trajectory import Outcome
from quartet.contrib.openenv import websocket
from quartet.contrib.openenv.http import OpenEnv, OpenEnvHTTP
from quartet.contrib.openenv.websocket import OpenEnvWebSocket
from quartet.environments import EnvironmentFailed
from quartet.environments.host import EnvironmentHost
from tests.environments.test_host import PROMPT, ids, text
from tests.waiting import wait_until

KEY = "echoed_message"


@pytest.fixture
def http() -> Iterator[HTTPServer]:
    server = HTTPServer()
    yield server
    server.stop()


@pytest.fixture
def socket() -> Iterator[WebSocketServer]:
    server = WebSocketServer()
    yield server
    server.stop()


def start(server: HTTPServer | WebSocketServer, **settings: Any) -> OpenEnv:
    kind = OpenEnvHTTP if isinstance(server, HTTPServer) else OpenEnvWebSocket
    return kind(server.url, **{"observation_key": KEY, "timeout_seconds": 5, **settings})


def first_turn(environment: OpenEnv) -> None:
    """Start an episode, and take a turn."""
    environment.reset(1, {})
    environment.step("a")


@pytest.fixture(params=["http", "socket"])
def server(request: pytest.FixtureRequest) -> Any:
    """Server of each transport."""
    return request.getfixturevalue(request.param)


def test_an_episode(server: HTTPServer | WebSocketServer) -> None:
    environment = start(server)
    assert environment.reset(7, {}) == "start/7/0"
    assert environment.step("a") == ("a/7/1", 0.0, False)
    assert environment.step("b") == ("b/7/2", 0.0, False)
    assert environment.step("c") == ("c/7/3", 1.0, True)
    environment.close()


def test_http_requests_have_the_published_form(http: HTTPServer) -> None:
    environment = start(http, reset_arguments={"difficulty": 2}, fields_key="row")
    environment.reset(7, {"x": 1})
    environment.step("a")
    (_, reset), (_, step) = http.requests
    assert reset == {"seed": 7, "difficulty": 2, "row": {"x": 1}, "episode_id": reset["episode_id"]}
    assert step["action"] == {"message": "a"}
    assert (step["timeout_s"], step["request_id"]) == (5, f"{reset['episode_id']}-1")
    assert isinstance(environment, OpenEnvHTTP)
    assert environment.is_healthy()
    assert environment.state() == {"episode_id": "e", "step_count": 1}


def test_web_socket_messages_have_the_published_form(socket: WebSocketServer) -> None:
    environment = start(socket)
    environment.reset(7, {})
    environment.step("a")
    environment.close()
    wait_until(lambda: socket.closed == 1)
    assert socket.messages == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"message": "a"}},
        {"type": "close"},
    ]
    assert socket.paths == {"/ws"}


def test_the_turn_may_be_the_whole_action_and_the_observation_json(http: HTTPServer) -> None:
    environment = start(http, action_key=None, observation_key=None)
    assert environment.reset(1, {}) == '{"echoed_message": "start/1/0"}'
    assert environment.step('{"message": "a"}')[0] == '{"echoed_message": "a/1/1"}'
    for turn in ("no", "[1]", '{"message": NaN}'):
        assert environment.step(turn) == (None, 0.0, True)
    assert len(http.requests) == 2


HTTP_FAULTS: dict[str, tuple[Callable[[Handler], None], str, str]] = {
    "500": (lambda handler: handler.answer({"detail": "secret"}, 500), "environment_error", "status 500"),
    "redirect": (lambda handler: handler.answer({}, 307), "environment_error", "status 307"),
    "broken JSON": (lambda handler: handler.raw(b"{"), "environment_error", "the answer is not JSON"),
    "NaN": (
        lambda handler: handler.raw(b'{"observation": {}, "reward": NaN}'),
        "environment_error",
        "the answer is not JSON",
    ),
    "list": (lambda handler: handler.answer([]), "environment_error", "the answer is not a JSON object"),
    "no observation": (lambda handler: handler.answer({"reward": 1.0}), "environment_error", "has no observation"),
    "other key": (lambda handler: handler.answer({"observation": {}}), "environment_error", "has no text"),
    "text reward": (
        lambda handler: handler.answer({"observation": {KEY: ""}, "reward": "1"}),
        "environment_error",
        "the reward is not a number",
    ),
    "number done": (
        lambda handler: handler.answer({"observation": {KEY: ""}, "done": 1}),
        "environment_error",
        "done is not true or false",
    ),
    "cut": (Handler.cut, "environment_error", "Error"),
    "drop": (Handler.drop, "environment_error", "RemoteProtocolError"),
    "hang": (Handler.hang, "timeout", "ReadTimeout"),
    "drip": (Handler.drip, "timeout", "no whole answer in time"),
    "huge": (
        lambda handler: handler.raw(b" " * (16 * 2**20 + 1)),
        "environment_error",
        "more than 16777216 bytes",
    ),
}

TIMEOUTS = {"hang": 0.3, "drip": 0.6}
"""Seconds until a request times out, by fault. Several bytes drip in them."""


@pytest.mark.parametrize("path", ["/reset", "/step"])
@pytest.mark.parametrize("fault", HTTP_FAULTS)
def test_a_fault_over_http_is_an_outcome(fault: str, path: str, http: HTTPServer) -> None:
    answer, outcome, cause = HTTP_FAULTS[fault]
    environment = start(http, timeout_seconds=TIMEOUTS.get(fault, 5))
    http.fault[path] = answer
    with pytest.raises(EnvironmentFailed, match=f"^{path}: .*{cause}") as failed:
        first_turn(environment)
    assert failed.value.outcome == outcome
    assert "secret" not in str(failed.value)


def test_a_step_is_not_sent_twice(http: HTTPServer) -> None:
    environment = start(http)
    environment.reset(1, {})
    http.fault["/step"] = Handler.drop
    with pytest.raises(EnvironmentFailed):
        environment.step("a")
    assert [path for path, _ in http.requests] == ["/reset", "/step"]


SOCKET_FAULTS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "error": (
        lambda it: send(it, "error", {"message": "secret", "code": "EXECUTION_ERROR"}),
        "environment_error",
        "EXECUTION_ERROR",
    ),
    "unknown error": (lambda it: send(it, "error", {"code": "secret"}), "environment_error", "an unknown error"),
    "broken JSON": (lambda it: it.send("{"), "environment_error", "the answer is not JSON"),
    "NaN": (
        lambda it: it.send('{"type": "observation", "data": {"reward": NaN}}'),
        "environment_error",
        "not JSON",
    ),
    "no data": (lambda it: it.send('{"type": "observation"}'), "environment_error", "not a message with data"),
    "state": (lambda it: send(it, "state", {}), "environment_error", "the answer is not an observation"),
    "no observation": (lambda it: send(it, "observation", {}), "environment_error", "has no observation"),
    "cut": (lambda it: it.socket.close(), "environment_error", "ConnectionClosed"),
    "closed": (lambda it: it.close(), "environment_error", "ConnectionClosed"),
    "hang": (lambda _: None, "timeout", "TimeoutError"),
}


@pytest.mark.parametrize("kind", ["reset", "step"])
@pytest.mark.parametrize("fault", SOCKET_FAULTS)
def test_a_fault_over_web_socket_is_an_outcome(fault: str, kind: str, socket: WebSocketServer) -> None:
    answer, outcome, cause = SOCKET_FAULTS[fault]
    environment = start(socket, timeout_seconds=TIMEOUTS.get(fault, 5))
    socket.fault[kind] = answer
    with pytest.raises(EnvironmentFailed, match=f"^{kind}: .*{cause}") as failed:
        first_turn(environment)
    assert failed.value.outcome == outcome
    assert "secret" not in str(failed.value)
    environment.close()


def test_a_server_without_room_is_tried_again(socket: WebSocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(connection: Any) -> None:
        del socket.fault["reset"]
        send(connection, "error", {"message": "full", "code": "CAPACITY_REACHED"})

    socket.fault["reset"] = full
    assert start(socket).reset(1, {}) == "start/1/0"
    socket.fault["reset"] = lambda it: send(it, "error", {"code": "CAPACITY_REACHED"})
    monkeypatch.setattr(websocket, "RETRY_SECONDS", 100.0)  # Later than the deadline.
    with pytest.raises(EnvironmentFailed, match="CAPACITY_REACHED"):
        start(socket).reset(1, {})


@pytest.mark.parametrize(("kind", "scheme"), [(OpenEnvHTTP, "http"), (OpenEnvWebSocket, "ws")])
def test_a_dead_server_is_an_outcome(kind: type[OpenEnv], scheme: str) -> None:
    before = time.monotonic()
    with pytest.raises(EnvironmentFailed):
        kind(f"{scheme}://127.0.0.1:9", timeout_seconds=0.5).reset(1, {})
    assert time.monotonic() - before < 5


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1:1",
        "127.0.0.1:1",
        "http://user:word@127.0.0.1:1",  # pragma: allowlist secret - an example
        "http://127.0.0.1:1/?a=b",
        "http://host:1",
    ],
)
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: "):
        OpenEnvHTTP(url)
    assert OpenEnvHTTP("http://host:1", allow_plaintext=True)


def test_the_token_is_sent_from_its_file(http: HTTPServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("word\n")
    sent: list[str] = []

    def answer(handler: Handler) -> None:
        sent.append(handler.headers["Authorization"])
        handler.answer({"observation": {KEY: ""}})

    http.fault["/reset"] = answer
    start(http, token_file=str(tmp_path / "token")).reset(1, {})
    assert sent == ["Bearer word"]


def test_a_hosted_server_plays_episodes_and_its_faults_are_outcomes(http: HTTPServer, model: Path) -> None:
    config = EnvironmentConfig(
        class_name="quartet.contrib.openenv.http:OpenEnvHTTP",
        arguments={"url": http.url, "observation_key": KEY},
    )
    played = EnvironmentHost(config, str(model))
    try:
        assert text(played.reset("s", 4, "", PROMPT)) == "start/4/0"
        assert text(played.step("s", 1, ids("a"))) == "a/4/1"
        http.fault["/step"] = HTTP_FAULTS["500"][0]
        reply = played.step("s", 2, ids("b"))
        assert (reply.outcome, json.dumps(reply.reward)) == (Outcome.ENVIRONMENT_ERROR, "NaN")
    finally:
        played.close()
