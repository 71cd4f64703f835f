"""With extra samples, a step keeps the trajectories of a prompt that used the fewest tokens and turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import FinishReason, Outcome, Segment, SegmentRole, Trajectory
from quartet.errors import BufferFailed, ComputationFailed, ScorerFailed
from quartet.services.orchestrator.rollout.collector import CollectedStep
from tests.buffer.samples import trajectory
from tests.services.orchestrator.rollout.failing_services import (
    Actor,
    FailingScorer,
    collect,
    failed_trajectories,
    scored,
)

KEPT = 2


def episode(run: str, prompt: int, sample: int, tokens: int) -> Trajectory:
    return trajectory(run, prompt, sample=sample, response=tokens)


def in_two_turns(item: Trajectory) -> Trajectory:
    """Return the episode with its tokens in two turns."""
    prompt, turn = item.segments
    first, second = (
        replace(turn, token_ids=turn.token_ids[part], log_probs=turn.log_probs[part])
        for part in (slice(1), slice(1, None))
    )
    observation = Segment(SegmentRole.OBSERVATION, prompt.token_ids)
    return replace(item, segments=(prompt, first, observation, second))


def ended(item: Trajectory) -> Trajectory:
    """Return the episode as a generator ends it that knows that the step does not need it."""
    return replace(item, finish_reason=FinishReason.FAILED, outcome=Outcome.LEFT_OUT)


def left_out(step: CollectedStep) -> list[tuple[int, int]]:
    return [(id.prompt, id.sample) for id in step.left_out]


def test_a_step_keeps_the_episodes_that_used_the_fewest_tokens_in_any_order_of_arrival(
    stream: RolloutStream, run: str
) -> None:
    episodes = [episode(run, 1, sample, tokens) for sample, tokens in enumerate((7, 3, 5, 4))]
    for order in permutations(episodes):
        stream.reset()
        scorer = FailingScorer(ComputationFailed("no"))
        step = collect(stream, scorer, list(order), Actor(stream, run), kept_samples=KEPT)
        assert scored(step) == [(1, 1), (1, 3)]
        assert left_out(step) == [(1, 0), (1, 2)]
        assert not step.failed_trajectories
        # What the step does not need is not scored either.
        assert [len(names) for names in scorer.requests["score"]] == [KEPT]


def test_among_episodes_of_equal_tokens_those_of_fewer_turns_count_and_then_the_first_samples(
    stream: RolloutStream, run: str
) -> None:
    episodes = [episode(run, 1, sample, 4) for sample in range(4)]
    episodes[0] = in_two_turns(episodes[0])
    step = collect(stream, FailingScorer(ComputationFailed("no")), episodes, Actor(stream, run), kept_samples=KEPT)
    assert scored(step) == [(1, 1), (1, 2)]
    assert left_out(step) == [(1, 0), (1, 3)]


@pytest.mark.parametrize("is_ended", [True, False])
def test_an_episode_that_the_generator_ended_is_left_out_like_one_that_it_finished(
    is_ended: bool, stream: RolloutStream, run: str
) -> None:
    episodes = [episode(run, 1, sample, tokens) for sample, tokens in enumerate((7, 3, 5))]
    written = [ended(episodes[0]) if is_ended else episodes[0], *episodes[1:]]
    step = collect(stream, FailingScorer(ComputationFailed("no")), written, Actor(stream, run), kept_samples=KEPT)
    assert scored(step) == [(1, 1), (1, 2)]
    assert left_out(step) == [(1, 0)]


def test_a_failed_episode_needs_no_replacement_while_enough_are_left(stream: RolloutStream, run: str) -> None:
    episodes = [episode(run, 1, sample, 3 + sample) for sample in range(4)]
    failed = replace(
        episodes[0], finish_reason=FinishReason.FAILED, outcome=Outcome.ENVIRONMENT_ERROR, detail="the dice are lost"
    )
    actor = Actor(stream, run)
    step = collect(stream, FailingScorer(ComputationFailed("no")), [failed, *episodes[1:]], actor, kept_samples=KEPT)
    assert scored(step) == [(1, 1), (1, 2)]
    assert left_out(step) == [(1, 3)]
    assert [name for name, _ in failed_trajectories(step)] == [(1, 0)]
    assert actor.requests == []


def test_an_episode_that_could_not_be_scored_is_replaced_by_a_new_one_and_not_by_one_that_was_left_out(
    stream: RolloutStream, run: str
) -> None:
    """Whether the generator has finished the one that is left out depends on time."""
    episodes = [episode(run, 1, sample, 3 + sample) for sample in range(3)]
    actor = Actor(stream, run)
    scorer = FailingScorer(ScorerFailed("no"), score={(1, 0): 1000})
    step = collect(stream, scorer, episodes, actor, kept_samples=KEPT)
    assert scored(step) == [(1, 1), (1, 3)]
    assert left_out(step) == [(1, 2)]
    assert actor.requests == [({1}, 3)]


def test_the_trajectories_of_a_prompt_are_scored_in_one_batch(stream: RolloutStream, run: str) -> None:
    episodes = [episode(run, prompt, sample, 3 + sample) for prompt in range(5) for sample in range(3)]
    scorer = FailingScorer(ComputationFailed("no"))
    step = collect(stream, scorer, episodes, Actor(stream, run), kept_samples=KEPT)
    assert len(step.scored) == 5 * KEPT
    # Batches of at least three generated trajectories: one prompt each.
    assert sorted({prompt for prompt, _ in names} for names in scorer.requests["score"]) == [{0}, {1}, {2}, {3}, {4}]


@pytest.mark.parametrize("fails_before_it_is_ended", [True, False])
def test_an_episode_that_failed_with_more_tokens_than_those_kept_is_left_out(
    fails_before_it_is_ended: bool, stream: RolloutStream, run: str
) -> None:
    """Whether it failed or was ended first depends on time."""
    episodes = [episode(run, 1, sample, tokens) for sample, tokens in enumerate((9, 3, 5))]
    failed = replace(
        episodes[0], finish_reason=FinishReason.FAILED, outcome=Outcome.ENVIRONMENT_ERROR, detail="the dice are lost"
    )
    written = [failed if fails_before_it_is_ended else ended(episodes[0]), *episodes[1:]]
    step = collect(stream, FailingScorer(ComputationFailed("no")), written, Actor(stream, run), kept_samples=KEPT)
    assert scored(step) == [(1, 1), (1, 2)]
    assert (left_out(step), step.failed_trajectories) == ([(1, 0)], [])


def test_a_generator_may_not_leave_out_what_the_step_needs(stream: RolloutStream, run: str) -> None:
    episodes = [episode(run, 1, sample, 3) for sample in range(3)]
    with pytest.raises(BufferFailed, match="was left out, but the step needs all trajectories"):
        collect(stream, FailingScorer(ComputationFailed("no")), [ended(episodes[0]), *episodes[1:]], Actor(stream, run))
