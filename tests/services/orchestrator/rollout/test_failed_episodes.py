"""Episodes that failed are recorded and replaced. They are never scored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import OutcomeConfig, OutcomesConfig
from quartet.contract.trajectory import FinishReason, Outcome, Trajectory
from quartet.errors import ComputationFailed, ScorerFailed, ServiceFailed, TooManyFailedTrajectories
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from tests.services.orchestrator.rollout.failing_services import (
    Actor,
    FailingScorer,
    batch_of,
    collect,
    ended_generation,
    failed_trajectories,
    recovery_config,
    sampled,
    scored,
)


def failed(trajectory: Trajectory, outcome: Outcome = Outcome.ENVIRONMENT_ERROR, turns: int = 1) -> Trajectory:
    """Return the trajectory as an episode that failed after this many turns."""
    return replace(
        trajectory,
        segments=trajectory.segments[: 1 + turns],
        finish_reason=FinishReason.FAILED,
        outcome=outcome,
        detail="the dice are lost",
    )


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("outcome", [Outcome.ENVIRONMENT_ERROR, Outcome.TIMEOUT])
def test_a_failed_episode_is_not_scored_and_is_replaced(
    outcome: Outcome, turns: int, stream: RolloutStream, run: str
) -> None:
    scorer, actor = FailingScorer(ComputationFailed("no")), Actor(stream, run)
    written = [sampled(run, prompt) for prompt in (8, 4, 1, 3, 2)]
    written[1] = failed(written[1], outcome, turns)
    step = collect(stream, scorer, written, actor)
    assert scored(step) == [(1, 0), (2, 0), (3, 0), (4, 1), (8, 0)]
    # The generator has played it as often as the default action, retry, allows.
    assert failed_trajectories(step) == [((4, 0), 3)]
    assert step.failed_trajectories[0].outcome is outcome
    assert step.failed_trajectories[0].error == f"{run}/1/4/0: {outcome}: the dice are lost"
    assert actor.requests == [({4}, 1)]
    assert scorer.requests["score"] == [[(1, 0), (2, 0), (3, 0)], [(8, 0)], [(4, 1)]] or scorer.requests["score"] == [
        [(8, 0)],
        [(1, 0), (2, 0), (3, 0)],
        [(4, 1)],
    ]
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_a_batch_of_failed_episodes_only_is_replaced_as_a_whole(stream: RolloutStream, run: str) -> None:
    scorer, actor = FailingScorer(ComputationFailed("no")), Actor(stream, run)
    step = collect(stream, scorer, [failed(sampled(run, prompt)) for prompt in range(3)], actor)
    assert scored(step) == [(0, 1), (1, 1), (2, 1)]
    assert scorer.requests["score"] == [[(0, 1), (1, 1), (2, 1)]]


@pytest.mark.parametrize("episodes", [3, 9])
def test_too_many_failed_episodes_are_an_error_of_the_service(episodes: int, stream: RolloutStream, run: str) -> None:
    """A service that fails for all of them, such as one that is away, is no fault of a trajectory: the run recovers."""
    written = [failed(sampled(run, prompt)) for prompt in range(episodes)]
    with pytest.raises(ServiceFailed, match="environment_error: the dice are lost") as raised:
        collect(
            stream,
            FailingScorer(ComputationFailed("no")),
            written,
            Actor(stream, run),
            recovery=recovery_config(max_failed_trajectories=2),
        )
    assert not isinstance(raised.value, TooManyFailedTrajectories)
    # They are written, as those of any other step that fails.
    assert len(raised.value.failed_trajectories) == 3


def test_the_action_of_a_failed_episodes_outcome_may_stop_the_run(stream: RolloutStream, run: str) -> None:
    outcomes = OutcomesConfig(environment_error=OutcomeConfig(action="stop"))
    with pytest.raises(TooManyFailedTrajectories, match=r"recovery\.outcomes\.environment_error\.action is stop"):
        collect(
            stream,
            FailingScorer(ComputationFailed("no")),
            [failed(sampled(run, prompt)) for prompt in range(3)],
            Actor(stream, run),
            recovery=recovery_config(max_failed_trajectories=2, outcomes=outcomes),
        )


def test_the_environments_rewards_are_part_of_the_score(stream: RolloutStream, run: str) -> None:
    written = [
        replace(sampled(run, prompt), turn_rewards=(0.5 * prompt,), logged={"steps": prompt}) for prompt in range(3)
    ]
    step = collect(stream, FailingScorer(ComputationFailed("no")), written, Actor(stream, run))
    assert [item.score for item in step.scored] == [0.0, 1.5, 3.0]
    assert [item.parts for item in step.scored] == [
        {"half": prompt / 2, "environment": 0.5 * prompt} for prompt in range(3)
    ]
    # What agents log goes on, beside what the reward source logs.
    assert [item.logged["steps"] for item in step.scored] == [0, 1, 2]


def test_a_failed_episode_of_an_evaluation_is_an_error_that_quotes_nothing(stream: RolloutStream, run: str) -> None:
    written = [failed(sampled(run, 0))]
    stream.append(written)
    scorer = FailingScorer(ComputationFailed("no"))
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 0.7), 1)  # type: ignore[arg-type]
    try:
        with pytest.raises(ScorerFailed, match=rf"{run}/1/0/0 failed with outcome environment_error") as raised:
            collector.collect(batch_of(written), ended_generation(), lambda scored: None)
        assert "dice" not in str(raised.value)
    finally:
        collector.reset()
