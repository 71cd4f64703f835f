"""Responses without a score: each kind of failure has its action, and fails no other response of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import RecoveryConfig
from quartet.contract.trajectory import FAILURES, Outcome, Scores, TokenBatch
from quartet.errors import ScorerFailed, ServiceFailed, TooManyFailedTrajectories
from quartet.services.orchestrator.checkpointing.step_artifacts import outcome_metrics
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from tests.services.orchestrator.rollout.failing_services import (
    ALWAYS,
    Actor,
    FailingScorer,
    Name,
    assert_own_results,
    batch_of,
    collect,
    ended_generation,
    failed_trajectories,
    names,
    recovery_config,
    sampled,
    scored,
)


class OutcomeScorer(FailingScorer):
    """Scorer that reports outcomes: for some trajectories a failure, a number of times."""

    def __init__(self, failures: Mapping[Name, tuple[Outcome, int]]) -> None:
        super().__init__(ServiceFailed("unused"))
        self._outcomes = dict(failures)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), weights: Any = None) -> Any:
        outcomes = []
        for name in names(batch):
            outcome, left = self._outcomes.get(name, (Outcome.OK, 0))
            outcomes.append(outcome if left else Outcome.OK)
            self._outcomes[name] = (outcome, max(0, left - 1))
        ok = np.array([outcome is Outcome.OK for outcome in outcomes])
        total = np.array([prompt + sample / 8 for prompt, sample in names(batch)], np.float32)
        total = np.where(ok, total, np.float32(np.nan))
        details = tuple("" if outcome is Outcome.OK else f"source: {outcome}" for outcome in outcomes)
        return self._call("score", batch, lambda: Scores(total, {"half": total / 2}, tuple(outcomes), details))


def action(outcome: Outcome, name: str, **changes: Any) -> RecoveryConfig:
    return recovery_config(outcomes={outcome: {"action": name}}, **changes)


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failure_that_is_retried_and_stays_is_replaced(outcome: Outcome, stream: RolloutStream, run: str) -> None:
    scorer, actor = OutcomeScorer({(1, 0): (outcome, ALWAYS)}), Actor(stream, run)
    written = [sampled(run, prompt) for prompt in range(3)]
    step = collect(stream, scorer, written, actor, recovery=action(outcome, "retry"))
    assert scored(step) == [(0, 0), (1, 1), (2, 0)]
    assert_own_results(step)
    assert failed_trajectories(step) == [((1, 0), 3)]
    [failed] = step.failed_trajectories
    assert (failed.outcome, failed.error, failed.cause) == (outcome, f"source: {outcome}", f"source: {outcome}")
    batch = [(0, 0), (1, 0), (2, 0)]
    assert scorer.requests["score"] == [batch, batch, [(1, 0)], [(1, 1)]], "a scored response was sent again"
    assert outcome_metrics(step.failed_trajectories) == {f"outcome_{each}": int(each is outcome) for each in FAILURES}


def test_a_failure_that_ends_within_the_attempts_changes_nothing(stream: RolloutStream, run: str) -> None:
    scorer = OutcomeScorer({(0, 0): (Outcome.TIMEOUT, 1), (2, 0): (Outcome.SCORER_ERROR, 2)})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert scored(step) == [(0, 0), (1, 0), (2, 0)]
    assert_own_results(step)
    assert step.failed_trajectories == []
    batch = [(0, 0), (1, 0), (2, 0)]
    assert scorer.requests["score"] == [batch, batch, [(2, 0)]]


@pytest.mark.parametrize("outcome", FAILURES)
def test_replace_makes_no_further_attempt(outcome: Outcome, stream: RolloutStream, run: str) -> None:
    scorer, actor = OutcomeScorer({(1, 0): (outcome, ALWAYS)}), Actor(stream, run)
    written = [sampled(run, prompt) for prompt in range(3)]
    step = collect(stream, scorer, written, actor, recovery=action(outcome, "replace"))
    assert scored(step) == [(0, 0), (1, 1), (2, 0)]
    assert failed_trajectories(step) == [((1, 0), 1)]
    assert scorer.requests["score"] == [[(0, 0), (1, 0), (2, 0)], [(1, 1)]]


@pytest.mark.parametrize("outcome", FAILURES)
def test_stop_ends_the_step_with_the_trajectory_and_the_outcome(
    outcome: Outcome, stream: RolloutStream, run: str
) -> None:
    scorer, actor = OutcomeScorer({(1, 0): (outcome, ALWAYS)}), Actor(stream, run)
    written = [sampled(run, prompt) for prompt in range(3)]
    with pytest.raises(TooManyFailedTrajectories) as raised:
        collect(stream, scorer, written, actor, recovery=action(outcome, "stop"))
    cause, text, _ = str(raised.value).split("\n")
    assert cause == f"source: {outcome}"
    assert text == (
        f"step 1: trajectory {run}/1/1/0 could not be scored, outcome {outcome}; recovery.outcomes.{outcome}.action is "
        "stop; fix the cause, or set retry or replace"
    )
    assert [item.trajectory.id.prompt for item in raised.value.failed_trajectories] == [1]
    assert actor.requests == []


def test_each_failure_of_a_batch_has_its_own_action(stream: RolloutStream, run: str) -> None:
    scorer = OutcomeScorer({(0, 0): (Outcome.REFUSED, ALWAYS), (2, 0): (Outcome.TIMEOUT, ALWAYS)})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert scored(step) == [(0, 1), (1, 0), (2, 1)]
    assert failed_trajectories(step) == [((0, 0), 1), ((2, 0), 3)]
    assert [item.outcome for item in step.failed_trajectories] == [Outcome.REFUSED, Outcome.TIMEOUT]


def test_failures_of_every_kind_count_towards_the_limit(stream: RolloutStream, run: str) -> None:
    scorer = OutcomeScorer({(prompt, 0): (FAILURES[prompt], ALWAYS) for prompt in range(4)})
    recovery = recovery_config(max_failed_trajectories=3)
    with pytest.raises(TooManyFailedTrajectories, match="4 of its trajectories could not be scored"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(4)], Actor(stream, run), 4, recovery=recovery)


def test_a_source_that_fails_for_every_response_is_no_lost_service(stream: RolloutStream, run: str) -> None:
    scorer = OutcomeScorer({(prompt, 0): (Outcome.TIMEOUT, ALWAYS) for prompt in range(3)})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert scored(step) == [(0, 1), (1, 1), (2, 1)]


def test_an_error_of_the_whole_call_gives_up_no_other_trajectory(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ServiceFailed("HTTP 500"), score={(1, 0): ALWAYS})
    recovery = action(Outcome.SCORER_ERROR, "replace")
    written = [sampled(run, prompt) for prompt in range(3)]
    step = collect(stream, scorer, written, Actor(stream, run), recovery=recovery)
    assert scored(step) == [(0, 0), (1, 1), (2, 0)]
    assert failed_trajectories(step) == [((1, 0), 3)]
    assert step.failed_trajectories[0].outcome is Outcome.SCORER_ERROR


def test_without_a_replacement_rule_a_failure_is_an_error(stream: RolloutStream, run: str) -> None:
    scorer = OutcomeScorer({(1, 0): (Outcome.TIMEOUT, ALWAYS)})
    written = [sampled(run, prompt) for prompt in range(3)]
    stream.append(written)
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 0.7), 3)  # type: ignore[arg-type]
    with pytest.raises(ScorerFailed, match=f"source: timeout; the batch, .*: {run}/1/0/0"):
        collector.collect(batch_of(written), ended_generation(), lambda _: None)
    collector.reset()
