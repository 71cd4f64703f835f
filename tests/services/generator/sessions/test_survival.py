"""Agents and generators that start again, and agents that fail: nothing is generated twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from quartet.codec.trajectories import trajectory_to_bytes
from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.trajectory import FinishReason, Outcome, Trajectory
from quartet.errors import AccessRefused, BufferFailed, Cancelled, FailedPrecondition
from tests.services.generator.sessions.agent_requests import ask, post, user
from tests.services.generator.sessions.harness import Rig, Script, wait_until

Scripted = Callable[[Script], Rig]


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
