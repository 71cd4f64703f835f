"""Trajectories that cannot be scored are recorded with their error and replaced by another sample of the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.errors import (
    BufferFailed,
    ComputationFailed,
    InvalidRequest,
    QuartetError,
    ServiceFailed,
    ServiceUnavailable,
    TooManyFailedTrajectories,
)
from tests.services.orchestrator.rollout.failing_services import (
    ALWAYS,
    SERVICES,
    Actor,
    FailingScorer,
    assert_own_results,
    collect,
    failed_trajectories,
    recovery_config,
    sampled,
    scored,
)


def test_greedy_responses_are_collected_apart_from_sampled_ones(stream: RolloutStream, run: str) -> None:
    written = [sampled(run, prompt, sample) for prompt in (2, 1) for sample in (1, 0)]
    step = collect(stream, FailingScorer(ComputationFailed("")), written, Actor(stream, run), greedy={(1, 1), (2, 1)})
    assert scored(step) == [(1, 0), (2, 0)]
    assert [(item.trajectory.id.prompt, item.trajectory.id.sample) for item in step.baselines] == [(1, 1), (2, 1)]
    assert len(step.entry_ids) == 4


def test_failed_greedy_and_sampled_responses_are_replaced_by_their_own_kind(stream: RolloutStream, run: str) -> None:
    """Prompt 1 loses both, prompt 2 the greedy one."""
    scorer = FailingScorer(ServiceFailed("raised"), score=dict.fromkeys(((1, 0), (1, 1), (2, 1)), ALWAYS))
    actor = Actor(stream, run)
    written = [sampled(run, prompt, sample) for prompt in (1, 2) for sample in (0, 1)]
    step = collect(
        stream,
        scorer,
        written,
        actor,
        greedy={(1, 1), (2, 1)},
        recovery=recovery_config(max_failed_trajectories=9),
    )
    assert list(zip(actor.requests, actor.greedy, strict=True)) == [(({1, 2}, 2), {1, 2}), (({1}, 3), set())]
    assert scored(step) == [(1, 3), (2, 0)]
    assert [(item.trajectory.id.prompt, item.trajectory.id.sample) for item in step.baselines] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("error", [ComputationFailed("not finite"), ServiceFailed("raised"), InvalidRequest("no")])
def test_a_failed_trajectory_is_replaced_by_the_next_sample(
    service: str, error: QuartetError, stream: RolloutStream, run: str
) -> None:
    scorer = FailingScorer(error, **{service: {(4, 0): ALWAYS}})
    actor, progress = Actor(stream, run), list[int]()
    written = [sampled(run, prompt) for prompt in (8, 4, 1, 3, 2)]
    step = collect(stream, scorer, written, actor, progress=progress)
    assert scored(step) == [(1, 0), (2, 0), (3, 0), (4, 1), (8, 0)]
    assert_own_results(step)
    assert failed_trajectories(step) == [((4, 0), 3)]
    assert step.failed_trajectories[0].error == f"{error} of 1", (
        "the error must come from the attempt with a single trajectory"
    )
    assert actor.requests == [({4}, 1)]
    batch, rest, replacement = [(4, 0), (8, 0)], [(1, 0), (2, 0), (3, 0)], [(4, 1)]
    singles = [[(4, 0)], [(8, 0)]]
    assert sorted(scorer.requests[service]) == sorted([batch, rest, batch, *singles, replacement])
    for other in set(SERVICES) - {service}:
        assert scorer.requests[other] == [batch, rest, replacement], "a service that succeeded received the batch again"
    assert progress[-1] == 5
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_each_failed_trajectory_of_a_prompt_is_replaced_by_a_new_sample(stream: RolloutStream, run: str) -> None:
    failing = {(7, 0): ALWAYS, (7, 1): ALWAYS, (5, 1): ALWAYS, (7, 2): ALWAYS, (7, 4): ALWAYS}
    scorer, actor = FailingScorer(ComputationFailed("no"), score=failing), Actor(stream, run)
    written = [sampled(run, prompt, sample) for prompt, sample in itertools.product((9, 7, 5), range(2))]
    step = collect(stream, scorer, written, actor, recovery=recovery_config(max_failed_trajectories=5))
    assert actor.requests == [({5, 7}, 2), ({7}, 3), ({7}, 4), ({7}, 5)]
    assert scored(step) == [(5, 0), (5, 2), (7, 3), (7, 5), (9, 0), (9, 1)], "the number of samples of a prompt changed"
    assert [name for name, _ in failed_trajectories(step)] == [(5, 1), (7, 0), (7, 1), (7, 2), (7, 4)]
    assert_own_results(step)
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_failed_trajectories_end_the_step_with_ids_and_error(
    limit: int, stream: RolloutStream, run: str
) -> None:
    scorer = FailingScorer(ComputationFailed("ValueError"), score={(prompt, 0): ALWAYS for prompt in range(9)})
    actor = Actor(stream, run)
    with pytest.raises(TooManyFailedTrajectories) as raised:
        collect(
            stream,
            scorer,
            [sampled(run, prompt) for prompt in range(9)],
            actor,
            score_batch_size=9,
            recovery=recovery_config(max_failed_trajectories=limit),
        )
    cause, step, text = str(raised.value).split("\n")
    assert cause.startswith("ValueError of 1")
    assert step.startswith(f"step 1: {limit + 1} of its trajectories could not be scored, ")
    assert f"recovery.max_failed_trajectories is {limit};" in step
    assert text.endswith(", ".join(f"{run}/1/{prompt}/0" for prompt in range(limit + 1)))
    assert len(scorer.requests["score"]) == 2 + limit + 1, "scoring continued after the limit"
    assert actor.requests == []
    assert [item.trajectory.id.prompt for item in raised.value.failed_trajectories] == list(range(limit + 1))


def test_failed_replacements_count_towards_the_limit(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(0, sample): ALWAYS for sample in range(10)})
    actor = Actor(stream, run)
    with pytest.raises(TooManyFailedTrajectories, match="step 1: 5 of its trajectories"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], actor)
    assert actor.requests == [({0}, sample) for sample in (1, 2, 3, 4)]


def test_a_trajectory_that_fails_at_two_services_counts_once(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), values={(1, 0): ALWAYS}, score={(1, 0): ALWAYS, (2, 0): ALWAYS})
    recovery = recovery_config(max_failed_trajectories=2)
    written = [sampled(run, prompt) for prompt in range(3)]
    step = collect(stream, scorer, written, Actor(stream, run), recovery=recovery)
    assert failed_trajectories(step) == [((1, 0), 3), ((2, 0), 3)]
    assert scored(step) == [(0, 0), (1, 1), (2, 1)]


def test_a_replacement_that_cannot_be_generated_ends_the_step(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    actor = Actor(stream, run, ServiceUnavailable("actor: gone"))
    with pytest.raises(ServiceUnavailable, match="actor: gone"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], actor)


def test_an_unrequested_replacement_is_an_error(stream: RolloutStream, run: str) -> None:
    class WrongPromptActor(Actor):
        def write(self, requested: list[Trajectory]) -> None:
            super().write([sampled(run, item.id.prompt + 1, item.id.sample) for item in requested])

    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    with pytest.raises(BufferFailed, match="/1/2/1 of policy version 0 was not requested"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], WrongPromptActor(stream, run))


def test_a_duplicate_of_a_failed_trajectory_is_acknowledged_and_not_scored(stream: RolloutStream, run: str) -> None:
    class RepeatingActor(Actor):
        def write(self, requested: list[Trajectory]) -> None:
            super().write([sampled(run, 1), sampled(run, 0), *requested])

    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], RepeatingActor(stream, run))
    assert scored(step) == [(0, 0), (1, 1), (2, 0)]
    assert scorer.requests["score"][-1] == [(1, 1)]
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_replacements_have_regular_ids(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run))
    assert step.scored[1].trajectory.id == TrajectoryId(run, 1, 1, 1)


def test_the_log_does_not_quote_responses(stream: RolloutStream, run: str, log_lines: list[dict[str, Any]]) -> None:
    scorer = FailingScorer(ComputationFailed("ValueError: cannot read 'my secret'"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run))
    [line] = [line for line in log_lines if line["event"] == "trajectory failed"]
    assert line["error"] == "ComputationFailed"
    assert line["id"] == f"{run}/1/1/0"
    assert "secret" not in str(log_lines)
    assert "my secret" in step.failed_trajectories[0].error


@pytest.fixture
def log_lines() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines
