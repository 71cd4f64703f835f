"""Sessions of users, as the endpoint of a run answers them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from select import select
from typing import Any, cast

import httpx2 as httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from quartet.buffer.traffic import TrafficStore
from quartet.engines.engine import ServedModel
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator import generator
from quartet.services.generator.sessions import factory
from quartet.services.generator.sessions.metrics import TrafficMetrics
from tests.ports import free_port
from tests.training.runs import wait_for
from tests.training.traffic.endpoint import (
    OTHER,
    VIEWER,
    Endpoint,
    has_weights,
)
from tests.waiting import LIMIT


@pytest.fixture(scope="module")
def waiting(start: Callable[..., Any]) -> Iterator[Endpoint]:
    """A run whose first step waits for more sessions than the tests end."""
    with start(rollout={"prompts_per_step": 512}) as endpoint:
        yield endpoint


def test_a_session_continues_with_the_ids_that_were_generated(waiting: Endpoint) -> None:
    first = waiting.ask("chat", "ab")
    assert first.session_id == "chat"
    text = first.choices[0].message.content
    second = waiting.ask("chat", "ab", text, "cd")
    # One sequence: the ids of the first answer, and those of ";cd;" after it.
    expected = first.usage.prompt_tokens + first.usage.completion_tokens + 4
    assert second.usage.prompt_tokens in (expected, expected - 1)
    assert waiting.request("GET", "/sessions/chat").json() == {
        "id": "chat",
        "object": "session",
        "state": "open",
        "requests": 2,
    }


def test_a_request_without_an_id_opens_a_session_that_its_answer_names(waiting: Endpoint) -> None:
    with waiting.client() as client:
        raw = client.completions.with_raw_response.create(model=waiting.model, prompt="ab", max_tokens=3)
    session = raw.headers["x-session-id"]
    assert raw.parse().session_id == session  # type: ignore[attr-defined]
    assert waiting.state(session) == "open"
    assert waiting.reward(session, 0.5).json() == {
        "id": session,
        "object": "session",
        "state": "rewarded",
        "requests": 1,
        "reward": 0.5,
    }


def test_streams_name_their_session(waiting: Endpoint) -> None:
    chunks = waiting.ask("streamed", "ab", stream=True)
    assert {chunk.session_id for chunk in chunks} == {"streamed"}


def test_a_request_with_store_false_leaves_nothing_behind(waiting: Endpoint) -> None:
    answer = waiting.ask("private", "ab", store=False)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert waiting.request("GET", "/sessions/private").status_code == 404
    waiting.ask("mixed", "ab")
    waiting.ask("mixed", "secret", store=False)
    assert waiting.request("GET", "/sessions/mixed").json()["requests"] == 1


def test_keys_of_viewers_give_no_rewards_and_see_no_sessions(waiting: Endpoint) -> None:
    waiting.ask("guarded", "ab")
    for method, path in (("POST", "/reward"), ("GET", ""), ("DELETE", "")):
        response = waiting.request(method, f"/sessions/guarded{path}", VIEWER, content='{"reward": 1}')
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    response = waiting.request("GET", "/models", "wrong")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert waiting.request("GET", "/models", VIEWER).json()["data"][0]["id"] == waiting.model


def test_users_do_not_see_sessions_of_other_keys(waiting: Endpoint) -> None:
    waiting.ask("mine", "ab")
    with pytest.raises(openai.ConflictError, match="another key"):
        waiting.ask("mine", "ab", key=OTHER)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "expected a JSON object"),
        (b"[1]", "expected an object such as"),
        (b'{"reward": "1"}', "expected a number from"),
        (b'{"reward": true}', "expected a number from"),
        (b'{"reward": NaN}', "expected a number from"),
        (b'{"reward": 1, "step": 2}', "expected an object such as"),
        (b'{"reward": 1, "logged": [1]}', "expected an object of numbers"),
        (b'{"reward": 1, "logged": {"a": null}}', "a is not a finite number"),
        (b'{"reward": 1, "logged": {"a": "' + b"x" * 1001 + b'"}}', "a text of at most 1000 characters"),
        (b'{"reward": 1, "logged": {"a b": 1}}', "letters, digits and underscores"),
    ],
)
def test_a_malformed_reward_changes_nothing(waiting: Endpoint, body: bytes, problem: str) -> None:
    session = waiting.ask(None, "ab").session_id
    response = waiting.request("POST", f"/sessions/{session}/reward", content=body)
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]
    assert waiting.state(session) == "open"


def test_a_session_has_one_reward_and_ends_with_it(waiting: Endpoint) -> None:
    waiting.ask("ended", "ab")
    logged = {"a": 1, "b": "x"}
    assert waiting.reward("ended", 1, logged=logged).status_code == 200
    assert waiting.reward("ended", 1.0, logged=dict(reversed(logged.items()))).status_code == 200
    for reward, other in ((2, logged), (1, {"a": 1}), (1, None)):
        refused = waiting.reward("ended", reward, logged=other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_ended")
    with pytest.raises(openai.ConflictError, match="begin another one"):
        waiting.ask("ended", "ab")
    assert waiting.reward("never", 1).status_code == 404


def test_a_deleted_session_is_gone(waiting: Endpoint) -> None:
    waiting.ask("withdrawn", "ab")
    for method in ("DELETE", "GET"):
        found = waiting.request(method, "/sessions/withdrawn").json()
        assert (found["state"], found["requests"]) == ("deleted", 1)
    assert waiting.reward("withdrawn", 1).json()["error"]["code"] == "session_ended"


@pytest.mark.parametrize("id", ["", "a b", "é", "x" * 129, "a/b"])
def test_an_unusable_id_is_refused(waiting: Endpoint, id: str) -> None:
    headers = {"authorization": f"Bearer {VIEWER}", "x-session-id": id.encode()}
    body = {"model": waiting.model, "prompt": "ab"}
    response = httpx.post(f"{waiting.url()}/completions", headers=headers, json=body, timeout=LIMIT)
    assert response.status_code == 400
    assert "X-Session-Id" in response.json()["error"]["message"]


def test_a_request_with_two_ids_is_refused(waiting: Endpoint) -> None:
    headers = [("authorization", f"Bearer {VIEWER}"), ("x-session-id", "one"), ("x-session-id", "two")]
    body = {"model": waiting.model, "prompt": "ab"}
    response = httpx.post(f"{waiting.url()}/completions", headers=headers, json=body, timeout=LIMIT)
    assert response.status_code == 400
    assert "X-Session-Id: expected one header, not 2" in response.json()["error"]["message"]


def test_a_refused_first_request_leaves_no_session(waiting: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        waiting.ask("refused", "a" * 500)
    assert refused.value.code == "context_length_exceeded"
    assert waiting.request("GET", "/sessions/refused").status_code == 404
    # Its id belongs to no one.
    assert waiting.ask("refused", "ab", key=OTHER).session_id == "refused"
    assert waiting.state("refused") == "open"


def test_metrics_count_responses_and_sessions_that_wait(waiting: Endpoint) -> None:
    registry, traffic = CollectorRegistry(), waiting.servers[-1]
    registry.register(TrafficMetrics(traffic.responses, traffic.waiting))

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"quartet_traffic_{name}", labels) or 0.0

    before = [value("requests_total", status=status) for status in ("2xx", "4xx", "5xx")]
    opened = value("sessions", state="open")
    for id in ("counted", "counted-open"):
        waiting.ask(id, "ab")
    waiting.reward("counted", 1)
    waiting.request("GET", "/models", "wrong")
    assert [value("requests_total", status=status) for status in ("2xx", "4xx", "5xx")] == [
        before[0] + 3,
        before[1] + 1,
        before[2],
    ]
    assert value("sessions", state="open") == opened + 1
    # The step takes those with a reward.
    assert registry.get_sample_value("quartet_traffic_sessions", {"state": "rewarded"}) is not None


def test_errors_for_users_speak_of_sessions(waiting: Endpoint) -> None:
    def error(**fields: Any) -> str:
        key, path = fields.pop("key", VIEWER), fields.pop("path", "/completions")
        body = {"model": waiting.model, "prompt": "ab", **fields}
        return waiting.request("POST", path, key, json=body).text

    texts = [
        error(prompt="a" * 500),
        error(n=5),
        error(model="other"),
        httpx.get(f"{waiting.url()}/models", timeout=LIMIT).text,
        error(key="wrong"),
        waiting.request("GET", "/models/other", VIEWER).text,
    ]
    waiting.ask("ended-early", "ab")
    waiting.reward("ended-early", 1)
    with pytest.raises(openai.ConflictError) as ended:
        waiting.ask("ended-early", "ab")
    assert all("message" in text for text in texts)
    for text in (*texts, str(ended.value)):
        assert "agent" not in text.replace("environment.agent.", "")
        assert "episode" not in text


def test_concurrent_requests_of_many_sessions_are_all_answered(waiting: Endpoint) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda number: waiting.ask(f"many-{number}", "ab"), range(32)))
    assert {answer.session_id for answer in answers} == {f"many-{number}" for number in range(32)}


def test_an_engine_that_takes_no_requests_in_between_answers_users_in_batches(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TakesTurns:
        """A class that the engine is not of."""

    monkeypatch.setattr(generator, "TurnEngine", TakesTurns)
    with start(rollout={"prompts_per_step": 512}) as endpoint, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda number: endpoint.ask(f"batched-{number}", "ab"), range(8)))
        assert len({answer.session_id for answer in answers}) == 8


def test_a_request_that_comes_while_the_tokenizer_is_loaded_waits(
    settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ("127.0.0.1", free_port())
    request = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {VIEWER}\r\nconnection: close\r\n\r\n"
    with ExitStack() as stack:
        clients = list[socket.socket]()

        def load(*_: Any) -> None:
            clients.append(stack.enter_context(socket.create_connection(address)))
            clients[0].sendall(request.encode())
            assert select([clients[0]], [], [], 0.2)[0] == []

        monkeypatch.setattr(factory, "_texts", load)
        config = settings(environment={"agent": {"listen": "{}:{}".format(*address)}})
        sessions: Any = factory.traffic_sessions(
            config, Credentials("generator"), ServedModel("", "float32", frozenset(), 1, 0), cast("TrafficStore", None)
        )
        stack.callback(sessions.close)
        answer = clients[0].makefile().read()
    assert answer.startswith("HTTP/1.1 200"), answer
    assert config.run.name in answer


def test_too_many_requests_and_sessions_get_a_429(start: Callable[..., Any]) -> None:
    limits = {"requests_per_minute": 12, "max_sessions": 2}
    with start(traffic=limits, rollout={"prompts_per_step": 512}) as endpoint:
        for id in ("a", "b"):
            endpoint.ask(id, "ab", key=OTHER)
        with pytest.raises(openai.RateLimitError, match="wait for a reward") as refused:
            endpoint.ask("c", "ab", key=OTHER)
        assert int(refused.value.response.headers["retry-after"]) > 0
        # Those that are open continue.
        endpoint.ask("a", "ab", key=OTHER)
        with ThreadPoolExecutor(4) as threads:
            requests = [threads.submit(endpoint.ask, "a", "ab", store=False, key=OTHER) for _ in range(12)]
        assert any("More than 12 requests" in str(request.exception()) for request in requests)
        assert endpoint.state("a") == "open"


def test_any_generator_answers_a_repeated_idempotency_key(start: Callable[..., Any]) -> None:
    with start(2, rollout={"prompts_per_step": 512}) as endpoint:
        headers = {"idempotency-key": "once", "x-session-id": "shared"}

        def answer(number: int, text: str = "ab") -> Any:
            with endpoint.client(number=number) as client:
                return client.completions.create(model=endpoint.model, prompt=text, extra_headers=headers)

        wait_for(endpoint.active, lambda: has_weights(endpoint, 0))
        first = answer(0)
        assert answer(1).choices == answer(0).choices == first.choices
        with pytest.raises(openai.BadRequestError) as refused:
            answer(1, "cd")
        assert refused.value.code == "idempotency_error"
        assert endpoint.request("GET", "/sessions/shared").json()["requests"] == 1
