"""Repeated requests, agents and generators that start again, and agents that fail: nothing is generated twice."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import httpx2 as httpx
import openai
import pytest
from starlette.requests import Request

from quartet.codec.trajectories import trajectory_to_bytes
from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.trajectory import FinishReason, Outcome, Trajectory
from quartet.errors import AccessRefused, BufferFailed, Cancelled, FailedPrecondition
from quartet.services.generator.sessions import app
from quartet.services.generator.sessions.protocol import ChatCall, parse_chat
from tests.services.generator.sessions.harness import Rig, Script, wait_until

Scripted = Callable[[Script], Rig]


@lru_cache(16)
def client_of(base_url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)


def ask(start: AgentRun, messages: list[Any], **settings: Any) -> Any:
    client = client_of(start.base_url, start.api_key)
    return client.chat.completions.create(model=start.model, messages=messages, **settings)


def post(start: AgentRun, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{start.base_url}/chat/completions",
        json={"model": start.model, "messages": messages, **fields},
        headers={"authorization": f"Bearer {start.api_key}", **(headers or {})},
        timeout=20,
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def dialogue(start: AgentRun, turns: int, before: Callable[[int], None] = lambda turn: None) -> AgentResult:
    messages: list[Any] = [user(f"one {start.fields}")]
    for turn in range(turns):
        before(turn)
        answer = ask(start, messages, max_tokens=4)
        messages += [answer.choices[0].message.model_dump(), user("two")]
    return AgentResult(1.0)


def encoded(result: list[Trajectory]) -> list[bytes]:
    return [trajectory_to_bytes(item) for item in result]


def test_an_agent_that_is_started_again_gets_its_answers_from_the_records(rig: Rig, run: str) -> None:
    turns, limit = 6, 300
    rig.max_prompt_tokens = 100
    expected = rig.checked(
        rig.batch(f"{run}-whole", 3, max_turns=turns, limit=limit), lambda start: dialogue(start, turns)
    )
    crashes = {0: 1, 1: 3, 2: 5}

    def fragile(start: AgentRun) -> AgentResult:
        number = int(start.session.split("/")[2])
        # The session of a further attempt has its number at the end.
        fails = crashes[number] if start.session.endswith("/1.4") else turns
        return (
            dialogue(start, turns)
            if fails == turns
            else dialogue(start, fails) and AgentResult.failed(Outcome.ENVIRONMENT_ERROR, "crashed")
        )

    rig.max_attempts = lambda outcome: 2
    result = rig.checked(rig.batch(f"{run}-whole2", 3, max_turns=turns, limit=limit), fragile)
    renamed = [replace(item, id=replace(item.id, run=f"{run}-whole")) for item in result]
    assert encoded(renamed) == encoded(expected)
    assert rig.turns == {"generated": 3 * turns, "recorded": sum(crashes.values())}


def test_a_generator_that_starts_again_continues_at_the_first_request_without_an_answer(rig: Rig, run: str) -> None:
    stop = threading.Event()

    def interrupted(turn: int) -> None:
        if turn == 3:
            stop.set()

    def cancelled() -> bool:
        return stop.is_set()

    rig.max_prompt_tokens = 100
    batch = rig.batch(run, max_turns=6, limit=300)

    def agent(start: AgentRun) -> AgentResult:
        return dialogue(start, 6, interrupted)

    with pytest.raises(Cancelled):
        rig.play(batch, agent, cancelled)
    assert rig.agents is not None
    assert rig.agents.cancelled == 1
    # Turns of episodes that do not end count, too.
    assert rig.turns["generated"] in (3, 4)
    keys = {start.api_key for start in rig.agents.runs}
    # The agent got an error, and its key is worth nothing now.
    assert isinstance(rig.agents.errors[0], openai.APIStatusError)
    [result] = rig.checked(replace(batch, attempt=5), lambda start: dialogue(start, 6))
    assert rig.agents.runs[0].api_key not in keys
    # The interrupted turn may have ended and be recorded.
    assert rig.turns["recorded"] in (3, 4)
    assert rig.turns["generated"] + rig.turns["recorded"] == 6
    [expected] = rig.checked(rig.batch(f"{run}-whole", max_turns=6, limit=300), lambda start: dialogue(start, 6))
    assert encoded([replace(result, id=expected.id)]) == encoded([expected])


def test_an_agent_that_does_otherwise_than_before_gets_new_answers(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        first = start.session.endswith("/1.4")
        ask(start, [user("one")], max_tokens=3)
        ask(start, [user("two" if first else "three")], max_tokens=3)
        return AgentResult.failed(Outcome.TIMEOUT, "slow") if first else AgentResult(1.0)

    rig.max_attempts = lambda outcome: 2
    [result] = rig.checked(rig.batch(run), agent)
    assert rig.turns == {"generated": 3, "recorded": 1}
    assert len(result.branches) == 2
    assert "three" in rig.text(result.branches[1].prompt_ids)


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "a"}])
def test_a_repeated_request_gets_the_same_answer(rig: Rig, run: str, headers: dict[str, str]) -> None:
    def agent(start: AgentRun) -> AgentResult:
        first = post(start, [user("one")], {name: value for name, value in headers.items() if name[0] == "i"}, n=2)
        assert first.status_code == 200
        again = post(start, [user("one")], headers, n=2)
        assert again.content == first.content
        # Without a sign of a repetition, it is another request.
        assert post(start, [user("one")], n=2).content != first.content
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 4


def test_an_idempotency_key_is_for_one_request(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        assert post(start, [user("one")], {"idempotency-key": "a"}).status_code == 200
        other = post(start, [user("two")], {"idempotency-key": "a"})
        assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_error")
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)


def test_requests_with_other_idempotency_keys_get_answers_of_their_own(scripted: Scripted, run: str) -> None:
    """Also a repetition whose first request got an error, and one after a lost answer."""
    go = threading.Event()

    def script(prompt: str) -> str:
        assert go.wait(20)
        return "fine"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{start.base_url}/chat/completions",
                json={"model": start.model, "messages": [user("one")]},
                headers={"authorization": f"Bearer {start.api_key}", "idempotency-key": "lost"},
                timeout=0.3,
            )
        wait_until(lambda: not rig.server._waiting)
        go.set()
        headers = ({"idempotency-key": "a"}, {"idempotency-key": "b", "x-stainless-retry-count": "1"}, {})
        answers = [post(start, [user("one")], each).json()["id"] for each in (*headers, {"idempotency-key": "lost"})]
        assert len({*answers}) == 4
        assert post(start, [user("one")], headers[1]).json()["id"] == answers[1]
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert rig.turns["generated"] == len(result.turns) == 4


def test_a_request_that_was_refused_is_new_when_the_client_repeats_it(
    scripted: Scripted, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", 3)
    refused = threading.Event()

    def script(prompt: str) -> str:
        assert refused.wait(20)
        return "fine"

    rig, ids = scripted(script), list[str]()

    def agent(start: AgentRun) -> AgentResult:
        client = openai.OpenAI(base_url=start.base_url, api_key=start.api_key, max_retries=9)
        threads = [
            threading.Thread(
                target=lambda: ids.append(client.chat.completions.create(model=start.model, messages=[user("one")]).id)
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: any(session.refused >= 3 for session in rig.server._sessions.values()))
        refused.set()
        for thread in threads:
            thread.join()
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)
    assert len({*ids}) == 6


def test_a_repetition_that_ends_early_does_not_take_back_an_answer(scripted: Scripted, run: str) -> None:
    rig, ended = scripted(lambda prompt: "fine"), threading.Event()

    def agent(start: AgentRun) -> AgentResult:
        assert post(start, [user("one")], {"idempotency-key": "a"}).status_code == 200
        [session] = rig.server._sessions.values()
        answer = session.answer(call_of(start, "one"), False, "a")
        session.set_delivered(answer, False)
        session.release(answer)
        ended.set()
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert ended.is_set()
    assert len(result.turns) == 1


def call_of(start: AgentRun, text: str) -> ChatCall:
    return parse_chat(json.dumps({"model": start.model, "messages": [user(text)]}).encode())[1]


def test_a_repetition_may_differ_in_fields_without_an_effect(rig: Rig, run: str) -> None:
    attempts: list[AgentRun] = []

    def agent(start: AgentRun) -> AgentResult:
        attempts.append(start)
        answer = post(start, [user("one")], metadata={"trace": str(len(attempts))}, seed=len(attempts))
        assert answer.status_code == 200
        assert len(attempts) == 2, "the first attempt fails"
        return AgentResult(1.0)

    rig.max_attempts = lambda outcome: 2
    rig.play(rig.batch(run), agent)
    assert rig.turns == {"generated": 1, "recorded": 1}


def test_a_connection_that_ends_before_its_answer_leaves_it_to_the_next_request(scripted: Scripted, run: str) -> None:
    asked, go = threading.Event(), threading.Event()

    def script(prompt: str) -> str:
        asked.set()
        assert go.wait(20)
        return f"answer {len(rig.engine.requests)}"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{start.base_url}/chat/completions",
                json={"model": start.model, "messages": [user("one")]},
                headers={"authorization": f"Bearer {start.api_key}"},
                timeout=0.3,
            )
        assert asked.is_set()
        go.set()
        assert ask(start, [user("one")]).choices[0].message.content == "answer 1"
        assert ask(start, [user("one")]).choices[0].message.content == "answer 2"
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 2


def test_an_answer_that_the_agent_never_got_is_no_part_of_the_episode(scripted: Scripted, run: str) -> None:
    go = threading.Event()

    def script(prompt: str) -> str:
        if "two" in prompt:
            assert go.wait(20)
        return "fine"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        ask(start, [user("one")])
        with pytest.raises(openai.APITimeoutError):
            ask(start, [user("two")], timeout=0.3)
        threading.Timer(0.2, go.set).start()
        return AgentResult(0.5)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 1
    assert result.turn_rewards == (0.5,)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_may_end_as_soon_as_it_has_its_answer(
    scripted: Scripted, run: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the server is slow."""
    rig, is_disconnected = scripted(lambda prompt: "fine"), Request.is_disconnected

    async def slowly(request: Request) -> bool:
        await asyncio.sleep(0.3)
        return await is_disconnected(request)

    monkeypatch.setattr(Request, "is_disconnected", slowly)

    def agent(start: AgentRun) -> AgentResult:
        with openai.OpenAI(base_url=start.base_url, api_key=start.api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model=start.model, messages=[user("one")], stream=stream)
            if stream:
                assert next(chunk for chunk in answer if chunk.choices[0].finish_reason)
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 1


def test_a_request_whose_client_left_while_it_waited_is_not_generated(scripted: Scripted, run: str) -> None:
    go = threading.Event()

    def script(prompt: str) -> str:
        assert go.wait(20)
        return "fine"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        first = threading.Thread(target=lambda: ask(start, [user("one")]))
        first.start()
        wait_until(lambda: len(rig.engine.requests) == 1)
        with pytest.raises(openai.APITimeoutError):
            ask(start, [user("two")], timeout=0.3)
        go.set()
        first.join()
        assert ask(start, [user("three")]).choices[0].message.content == "fine"
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)
    assert [request.turn for request in rig.engine.requests] == [0, 1]


def test_the_client_repeats_a_request_by_itself_after_a_lost_connection(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: f"answer {len(rig.engine.requests)}")
    losses = Counter[str]()

    def agent(start: AgentRun) -> AgentResult:
        host, _, port = rig.server.address.rpartition(":")
        proxy = socket.create_server(("127.0.0.1", 0))

        def forward() -> None:
            """Send the first request on and drop its response; let the second one pass."""
            for number in range(2):
                inside, _ = proxy.accept()
                outside = socket.create_connection((host, int(port)))
                data = b""
                while b"}]" not in data:
                    data += inside.recv(65536)
                outside.sendall(data)
                response = b""
                while not response.endswith(b"}}"):
                    response += outside.recv(65536)
                if number:
                    inside.sendall(response)
                else:
                    losses["response"] += 1
                inside.close()
                outside.close()

        thread = threading.Thread(target=forward)
        thread.start()
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{proxy.getsockname()[1]}/v1", api_key=start.api_key, max_retries=2
        )
        answer = client.chat.completions.create(model=start.model, messages=[user("one")])
        assert answer.choices[0].message.content == "answer 1"
        thread.join()
        proxy.close()
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert losses == {"response": 1}
    assert len(rig.engine.requests) == len(result.turns) == 1


def test_an_agent_that_fails_is_run_again_as_often_as_allowed(rig: Rig, run: str) -> None:
    rig.max_attempts = lambda outcome: 3 if outcome is Outcome.TIMEOUT else 1

    def agent(start: AgentRun) -> AgentResult:
        ask(start, [user("one")], max_tokens=3)
        return AgentResult.failed(Outcome.TIMEOUT, "agent: no end after 600 s")

    [result] = rig.checked(rig.batch(run), agent)
    assert (result.outcome, result.detail) == (Outcome.TIMEOUT, "agent: no end after 600 s")
    assert (result.finish_reason, result.turn_rewards) == (FinishReason.FAILED, ())
    assert rig.agents is not None
    assert [start.session for start in rig.agents.runs] == [
        f"{result.id}/1.4",
        f"{result.id}/1.4.2",
        f"{result.id}/1.4.3",
    ]
    assert len({start.api_key for start in rig.agents.runs}) == 3
    assert rig.turns == {"generated": 1, "recorded": 2}


def test_a_lost_service_counts_as_no_attempt(rig: Rig, run: str) -> None:
    started = Counter[str]()

    def agent(start: AgentRun) -> AgentResult:
        started[start.session] += 1
        if started[start.session] < 3:
            return AgentResult.failed(Outcome.ENVIRONMENT_ERROR, "killed", lost=True)
        return dialogue(start, 2)

    [result] = rig.checked(rig.batch(run, limit=100), agent)
    assert result.outcome is Outcome.OK
    assert started == {f"{result.id}/1.4": 3}


def test_an_agent_without_a_request_has_failed(rig: Rig, run: str) -> None:
    [result] = rig.checked(rig.batch(run), lambda start: AgentResult(1.0))
    assert (result.outcome, result.detail) == (
        Outcome.ENVIRONMENT_ERROR,
        "agent: ended without an answer of the policy",
    )
    assert [segment.role for segment in result.segments] == ["prompt"]
    assert trajectory_to_bytes(result)


def test_a_result_without_a_reward_leaves_it_to_the_reward_sources(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        ask(start, [user("one")], max_tokens=3)
        return AgentResult()

    [result] = rig.checked(rig.batch(run), agent)
    assert (result.outcome, result.turn_rewards) == (Outcome.OK, ())


def test_an_error_that_no_agent_can_avoid_ends_the_generation(rig: Rig, run: str) -> None:
    class Refusing:
        def __init__(self, agent: Any) -> None:
            self.errors: list[BaseException] = []

        def start(self, start: AgentRun, on_end: Any) -> Callable[[], None]:
            on_end(AccessRefused("the certificate is for another role"))
            return lambda: None

        def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.services.generator.sessions.harness.Agents", Refusing)
        with pytest.raises(AccessRefused):
            rig.play(rig.batch(run), lambda start: AgentResult())


class Refusal:
    """Records that cannot be written."""

    def __init__(self, records: Any, error: Exception | None) -> None:
        self._records, self._error = records, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    def append(self, id: Any, turn: Any) -> bool:
        if self._error is not None:
            raise self._error
        # Another process was faster, and its agent asks for something else.
        self._records.append(id, replace(turn, request=b"other"))
        return bool(self._records.append(id, turn))


def test_a_call_ends_after_the_turns_that_are_being_recorded(rig: Rig, run: str) -> None:
    """The next call would generate them again otherwise."""
    records, recording, go = rig.records, threading.Event(), threading.Event()

    class Slow(Refusal):
        def append(self, id: Any, turn: Any) -> bool:
            recording.set()
            assert go.wait(20)
            return bool(self._records.append(id, turn))

    rig.records = lambda batch: Slow(records(batch), None)

    def watch() -> None:
        wait_until(lambda: rig.agents is not None and rig.agents.cancelled == 1)
        go.set()

    thread = threading.Thread(target=watch)
    thread.start()
    batch = rig.batch(run, limit=300)
    with pytest.raises(Cancelled):
        rig.play(batch, lambda start: dialogue(start, 1), recording.is_set)
    thread.join()
    assert rig.turns == {"generated": 1}
    assert len(records(batch).load(batch.requests[0].id).turns) == 1


@pytest.mark.parametrize("error", [BufferFailed("the buffer is full"), None])
def test_an_answer_that_cannot_be_recorded_does_not_leave(rig: Rig, run: str, error: Exception | None) -> None:
    records, answers = rig.records, list[Any]()
    rig.records = lambda batch: Refusal(records(batch), error)

    def agent(start: AgentRun) -> AgentResult:
        answers.append(post(start, [user("one")]))
        return AgentResult(1.0)

    with pytest.raises(BufferFailed if error else FailedPrecondition):
        rig.play(rig.batch(run), agent)
    assert [answer.status_code for answer in answers] == [503]
    assert "full" not in answers[0].text
