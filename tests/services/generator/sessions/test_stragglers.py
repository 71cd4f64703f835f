"""Agents whose episodes a step does not need any more are ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.trajectory import FinishReason, Outcome, Trajectory, TrajectoryId
from quartet.contract.turn_record import EpisodeRecord
from quartet.services.generator.sessions.session import Session
from tests.services.generator.sessions.agent_requests import ask, post, user
from tests.services.generator.sessions.harness import Rig, Script, wait_until
from tests.services.generator.sessions.test_survival import dialogue

KEPT = 2


def samples(rig: Rig, run: str, count: int, greedy: int = 0) -> GenerationBatch:
    """Return a batch with trajectories of one prompt, the last ``greedy`` of them greedy, of which KEPT are kept."""
    batch = rig.batch(run, limit=100, max_turns=16)
    assert batch.episode is not None
    prompt = batch.requests[0].prompt_ids
    ids = [TrajectoryId(run, 3, 0, sample) for sample in range(count)]
    requests = [GenerationRequest(id, prompt, greedy=id.sample >= count - greedy) for id in ids]
    return replace(batch, requests=requests, episode=replace(batch.episode, kept_samples=KEPT))


def sample_of(start: AgentRun) -> int:
    return TrajectoryId.parse(start.session.rsplit("/", 1)[0]).sample


def test_an_agent_that_waits_is_ended_once_the_step_does_not_need_its_episode(
    scripted: Callable[[Script], Rig], run: str
) -> None:
    rig, asked, ended = scripted(lambda prompt: "one two three"), threading.Event(), threading.Event()

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start):
            asked.wait(20)
            return dialogue(start, turns=1)
        dialogue(start, turns=3)
        asked.set()
        # Like a tool that does not answer.
        ended.wait(20)
        return AgentResult(1.0)

    def end_when_cancelled() -> None:
        wait_until(lambda: rig.agents is not None and rig.agents.cancelled == 1)
        ended.set()

    watch = threading.Thread(target=end_when_cancelled)
    watch.start()
    long, *others = rig.checked(samples(rig, run, 3), agent)
    watch.join()
    assert (long.outcome, long.finish_reason, long.turn_rewards) == (Outcome.LEFT_OUT, FinishReason.FAILED, ())
    assert [item.outcome for item in others] == [Outcome.OK] * KEPT
    assert rig.turns == {"generated": 3 + KEPT}


def test_an_agent_that_asks_again_learns_that_its_episode_has_ended(
    scripted: Callable[[Script], Rig], run: str
) -> None:
    rig, finished = scripted(lambda prompt: "one two three"), threading.Semaphore(0)

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start):
            result = dialogue(start, turns=1)
            finished.release()
            return result
        for _ in range(KEPT):
            finished.acquire(timeout=20)
        return dialogue(start, turns=16)

    long, *others = rig.play(samples(rig, run, 3), agent)
    assert long.outcome is Outcome.LEFT_OUT
    assert [item.outcome for item in others] == [Outcome.OK] * KEPT
    assert rig.agents is not None
    assert [getattr(error, "status_code", None) for error in rig.agents.errors] == [401]


@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_may_be_left_out_while_its_agent_ends_or_starts_again(
    rig: Rig, run: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_left_out = threading.Event()
    original, records = Session.result, rig.records
    rig.max_attempts = lambda outcome: 2

    async def result(session: Session, reward: float | None, generator: str) -> Trajectory | None:
        trajectory = await original(session, reward, generator)
        if not session.id.sample and not fails:
            await asyncio.to_thread(is_left_out.wait, 20)
        return trajectory

    class Slow:
        """Records that are loaded for a second attempt once its episode is left out."""

        def __init__(self, batch: GenerationBatch) -> None:
            self._records = records(batch)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._records, name)

        def load(self, id: TrajectoryId) -> EpisodeRecord:
            found: EpisodeRecord = self._records.load(id)
            assert not found.turns or is_left_out.wait(20)
            return found

    monkeypatch.setattr(Session, "result", result)
    rig.records = Slow
    ended = threading.Event()

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start) == 3:
            # A greedy episode, which keeps the call open.
            assert is_left_out.wait(20)
            return dialogue(start, turns=4)
        if sample_of(start):
            assert ended.wait(20)
            return dialogue(start, turns=1)
        dialogue(start, turns=4)
        ended.set()
        return AgentResult.failed(Outcome.TIMEOUT, "slow") if fails else AgentResult(1.0)

    def watch() -> None:
        wait_until(lambda: rig.agents is not None and rig.agents.cancelled == 1)
        is_left_out.set()

    thread = threading.Thread(target=watch)
    thread.start()
    long, *others = rig.checked(samples(rig, run, 4, greedy=1), agent)
    thread.join()
    assert long.outcome is Outcome.LEFT_OUT
    assert [item.outcome for item in others] == [Outcome.OK] * (KEPT + 1)
    assert rig.agents is not None
    assert len(rig.agents.runs) == 4


def test_greedy_episodes_neither_end_nor_end_others(scripted: Callable[[Script], Rig], run: str) -> None:
    rig, finished = scripted(lambda prompt: "one two three"), threading.Semaphore(0)

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start) == 1:
            result = dialogue(start, turns=1)
            finished.release()
            return result
        finished.acquire(timeout=20)
        result = dialogue(start, turns=3)
        finished.release()
        return result

    result = rig.checked(samples(rig, run, 3, greedy=1), agent)
    assert [item.outcome for item in result] == [Outcome.OK] * 3


def test_a_request_whose_turn_is_generated_is_answered_when_its_episode_is_left_out(
    scripted: Callable[[Script], Rig], run: str
) -> None:
    asked, answered, errors = threading.Event(), threading.Semaphore(0), []

    def script(prompt: str) -> str:
        if "slow" in prompt:
            asked.set()
            # The turn ends only after its episode is left out.
            wait_until(lambda: rig.agents is not None and rig.agents.cancelled == 1)
        return "one two three"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start):
            result = dialogue(start, turns=1)
            answered.release()
            asked.wait(20)
            return result
        dialogue(start, turns=2)
        for _ in range(KEPT):
            answered.acquire(timeout=20)
        # It has used more than the others, which end while its next turn is generated.
        try:
            post(start, [user("slow")]).raise_for_status()
        except httpx.HTTPStatusError as error:
            errors.append(error.response.status_code)
        return AgentResult(1.0)

    result = rig.play(samples(rig, run, 3), agent)
    assert [item.outcome for item in result] == [Outcome.LEFT_OUT, *[Outcome.OK] * KEPT]
    assert errors == [401]


def test_answers_that_the_agent_does_not_get_do_not_count(scripted: Callable[[Script], Rig], run: str) -> None:
    """The trajectory does not have them either."""
    rig, finished = scripted(lambda prompt: "one two three"), threading.Semaphore(0)
    rig.max_branches = 2

    def agent(start: AgentRun) -> AgentResult:
        if sample_of(start):
            result = dialogue(start, turns=1)
            finished.release()
            return result
        ask(start, [user("main")], max_tokens=2)
        # Its second choice is above the limit of branches, so none is delivered.
        assert post(start, [user("main")], n=4).status_code == 400
        for _ in range(KEPT):
            finished.acquire(timeout=20)
        return AgentResult(1.0)

    result = rig.checked(samples(rig, run, 3), agent)
    assert [item.outcome for item in result] == [Outcome.OK] * 3
    assert result[0].consumption[:2] == (2, 1)
