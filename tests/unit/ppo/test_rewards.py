"""Token rewards, score normalisation, length penalties, and truncated responses."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quartet.errors import ComputationFailed, InvalidRequest
from quartet.ppo.kl import kl_estimate
from quartet.ppo.rewards import (
    EarlyRewards,
    RunningMoments,
    clip_scores,
    mask_truncated,
    normalize_scores,
    penalize_length,
    penalize_overlong,
    penalize_truncated,
    scale_truncated,
    token_rewards,
)
from tests.unit.ppo.batches import draw, gradient, ragged_lengths, seeds, split


@given(ragged_lengths, seeds)
def test_the_last_token_gets_the_score_and_every_token_the_kl_penalty(lengths: list[int], seed: int) -> None:
    kl, scores = draw(seed, sum(lengths)), draw(seed + 1, len(lengths))
    expected = []
    for score, sequence in zip(scores.tolist(), split(kl, lengths), strict=True):
        for position, k in enumerate(sequence):
            is_last = position == len(sequence) - 1
            expected.append(-0.05 * k + (score if is_last else 0.0))
    rewards = token_rewards(scores, kl, torch.tensor(lengths, dtype=torch.int32), 0.05)
    assert rewards.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("log_prob", "reference", "coefficient", "penalty"), [(-1.2, -1.6, 0.05, -0.02), (-2.0, -2.4, 0.1, -0.04)]
)
def test_a_worked_example_of_kl_penalties(
    log_prob: float, reference: float, coefficient: float, penalty: float
) -> None:
    kl = kl_estimate(torch.tensor([log_prob, 0.0]), torch.tensor([reference, 0.0]), "k1")
    rewards = token_rewards(torch.tensor([1.0]), kl, torch.tensor([2]), coefficient)
    assert rewards.tolist() == pytest.approx([penalty, 1.0], rel=1e-5)


def test_a_response_of_one_token_gets_score_and_penalty() -> None:
    rewards = token_rewards(torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), 0.5)
    assert rewards.tolist() == [1.5, 3.5]


def test_early_rewards_are_at_their_tokens_and_the_rest_of_the_score_at_the_last_one() -> None:
    # Responses of 3 and 2 tokens. Of score 5, 1 is for token 0 and 1.5 for token 1; of score -1, 2 is for token 3.
    early = EarlyRewards(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.5, 2.0]))
    kl = torch.tensor([1.0, 0.0, 2.0, 0.0, -1.0])
    rewards = token_rewards(torch.tensor([5.0, -1.0]), kl, torch.tensor([3, 2]), 0.5, early)
    assert rewards.tolist() == [1 - 0.5, 1.5, 2.5 - 1, 2, -3 + 0.5]


def test_the_kl_is_not_modified() -> None:
    kl = torch.ones(2)
    token_rewards(torch.ones(1), kl, torch.tensor([2]), 0.0)
    assert kl.tolist() == [1.0, 1.0]


def test_scores_are_normalised_by_the_reference_moments() -> None:
    assert normalize_scores(torch.tensor([1.0, 5.0, 3.0]), mean=3.0, std=2.0).tolist() == [-1.0, 1.0, 0.0]
    assert normalize_scores(torch.tensor([1.0, 5.0, 3.0]), mean=3.0, std=0.5).tolist() == [-4.0, 4.0, 0.0]


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_moments_that_cannot_normalise_are_refused(mean: float, std: float) -> None:
    with pytest.raises(InvalidRequest):
        normalize_scores(torch.zeros(2), mean, std)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), seeds, st.floats(-1e4, 1e4))
def test_running_moments_equal_those_of_all_scores(sizes: list[int], seed: int, offset: float) -> None:
    moments, everything = RunningMoments(), []
    for index, size in enumerate(sizes):
        scores = draw(seed + index, size) + offset
        moments.update(scores)
        everything += scores.double().tolist()
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(statistics.fmean(everything), rel=1e-9, abs=1e-9)
    assert moments.std == pytest.approx(statistics.pstdev(everything) or 1.0, rel=1e-6)


def test_equal_scores_are_only_shifted() -> None:
    moments = RunningMoments()
    assert (moments.count, moments.mean, moments.std) == (0, 0.0, 1.0)
    for _ in range(3):
        moments.update(torch.full((7,), 0.1, dtype=torch.float64))
    # In float64 the rounded mean of equal numbers may differ from them. A deviation of 1e-17 would give huge scores.
    assert (moments.count, moments.mean, moments.std) == (21, 0.1, 1.0)
    moments.update(torch.zeros(0))
    assert moments.count == 21


def test_moments_of_a_worked_example() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    assert (moments.mean, moments.std) == (2.0, 1.0)
    moments.update(torch.tensor([8.0]))
    assert moments.mean == pytest.approx(4.0)
    assert moments.std == pytest.approx(math.sqrt((9 + 1 + 16) / 3))


def test_moments_continue_from_their_checkpoint_bit_identically() -> None:
    first, second = RunningMoments(), RunningMoments()
    first.update(draw(0, 11))
    second.load(json.loads(json.dumps(first.state())))
    for moments in (first, second):
        moments.update(draw(1, 5))
    assert first.state() == second.state()
    assert (first.mean, first.std, first.count) == (second.mean, second.std, second.count)
    assert isinstance(second.count, int)


@pytest.mark.parametrize("scores", [[], [2.0], [2.0, 3.0], [2.0, 2.0, 2.0]], ids=str)
def test_the_state_of_few_scores_is_restored(scores: list[float]) -> None:
    first, second = RunningMoments(), RunningMoments()
    first.update(torch.tensor(scores))
    second.update(torch.tensor([7.0, 9.0]))
    second.load(first.state())
    assert (second.count, second.mean, second.std) == (first.count, first.mean, first.std)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"count": 3, "mean": 0.0},
        {"count": -1, "mean": 0.0, "squares": 0.0},
        {"count": 2.5, "mean": 0.0, "squares": 1.0},
        {"count": math.inf, "mean": 0.0, "squares": 1.0},
        {"count": 10**400, "mean": 0.0, "squares": 1.0},
        {"count": 3, "mean": math.nan, "squares": 1.0},
        {"count": 3, "mean": 0.0, "squares": -1.0},
        {"count": 3, "mean": 0.0, "squares": math.nan},
        {"count": 3, "mean": 0.0, "squares": math.inf},
        {"count": 1, "mean": 0.0, "squares": 1.0},
        {"count": 0, "mean": 2.0, "squares": 0.0},
        {"count": "many", "mean": 0.0, "squares": 0.0},
        {"count": None, "mean": 0.0, "squares": 0.0},
        None,
    ],
)
def test_an_impossible_state_of_moments_is_refused(state: Any) -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    with pytest.raises(InvalidRequest, match="score moments"):
        moments.load(state)
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_score_does_not_change_the_moments(bad: float) -> None:
    moments = RunningMoments()
    with pytest.raises(ComputationFailed, match="1 of 2 scores"):
        moments.update(torch.tensor([1.0, bad]))
    assert moments.count == 0


def test_scores_are_clipped_at_both_ends() -> None:
    assert clip_scores(torch.tensor([-9.0, -1.0, 0.5, 9.0]), 2.0).tolist() == [-2.0, -1.0, 0.5, 2.0]
    assert clip_scores(torch.tensor([-9.0, 0.25, 9.0]), 0.5).tolist() == [-0.5, 0.25, 0.5]


@given(ragged_lengths, seeds, st.floats(0, 2), st.integers(0, 12))
def test_only_tokens_beyond_the_free_ones_are_penalised(lengths: list[int], seed: int, price: float, free: int) -> None:
    scores = draw(seed, len(lengths))
    expected = [s - price * max(0, length - free) for s, length in zip(scores.tolist(), lengths, strict=True)]
    result = penalize_length(scores, torch.tensor(lengths, dtype=torch.int32), price, free)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(ragged_lengths, seeds, st.integers(0, 12), st.integers(0, 8), st.floats(0, 3))
def test_the_overlong_penalty_follows_its_definition(
    lengths: list[int], seed: int, buffer: int, more: int, penalty: float
) -> None:
    scores, longest = draw(seed, len(lengths)), buffer + more
    expected = []
    for score, length in zip(scores.tolist(), lengths, strict=True):
        if buffer == 0 or length <= longest - buffer:
            punishment = 0.0
        elif length <= longest:
            punishment = ((longest - buffer) - length) / buffer
        else:
            punishment = -1.0
        expected.append(score + penalty * punishment)
    result = penalize_overlong(scores, torch.tensor(lengths, dtype=torch.int32), longest, buffer, penalty)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_overlong_penalty_of_a_worked_example() -> None:
    # With a limit of 20 tokens and a buffer of 4, the penalty is 0 up to 16, half at 18, and full at 20.
    result = penalize_overlong(torch.zeros(5), torch.tensor([1, 16, 17, 18, 20]), 20, 4, 2.0)
    assert result.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]


def test_invalid_penalties_are_refused() -> None:
    one, length = torch.zeros(1), torch.tensor([1])
    with pytest.raises(InvalidRequest, match="limit"):
        clip_scores(one, 0.0)
    with pytest.raises(InvalidRequest, match="subtracted"):
        penalize_length(one, length, -1.0, 0)
    with pytest.raises(InvalidRequest, match="subtracted"):
        penalize_length(one, length, 1.0, -1)
    with pytest.raises(InvalidRequest, match="subtracted"):
        penalize_overlong(one, length, 8, 4, -1.0)
    for buffer in (-1, 9):
        with pytest.raises(InvalidRequest, match="buffer"):
            penalize_overlong(one, length, 8, buffer, 1.0)
    with pytest.raises(InvalidRequest, match="same length"):
        penalize_length(torch.zeros(2), length, 1.0, 0)
    with pytest.raises(InvalidRequest, match="same length"):
        penalize_overlong(torch.zeros(2), length, 8, 4, 1.0)


@given(ragged_lengths, seeds, st.sampled_from([0.0, 0.5, 1.5]))
def test_only_truncated_responses_are_treated(lengths: list[int], seed: int, penalty: float) -> None:
    scores = draw(seed, len(lengths))
    truncated = draw(seed + 1, len(lengths)) > 0
    pairs = list(zip(scores.tolist(), truncated.tolist(), strict=True))
    penalized = penalize_truncated(scores, truncated, penalty).tolist()
    assert penalized == pytest.approx([s - penalty if cut else s for s, cut in pairs], rel=1e-5, abs=1e-6)
    scaled = scale_truncated(scores, truncated, 0.25).tolist()
    assert scaled == pytest.approx([s * 0.25 if cut else s for s, cut in pairs])
    mask = mask_truncated(truncated, torch.tensor(lengths, dtype=torch.int32))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [
        0.0 if cut else 1.0 for length, cut in zip(lengths, truncated.tolist(), strict=True) for _ in range(length)
    ]


def test_the_mask_removes_the_gradient_of_a_truncated_response() -> None:
    mask = mask_truncated(torch.tensor([True, False]), torch.tensor([2, 1]))
    assert gradient(lambda x: (x * mask).sum(), torch.ones(3)) == [0.0, 0.0, 1.0]


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="subtracted"):
        penalize_truncated(torch.zeros(1), torch.tensor([True]), -1.0)


def test_mismatched_inputs_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        token_rewards(torch.zeros(1), torch.zeros(3), torch.tensor([1, 2]), 0.1)
    with pytest.raises(InvalidRequest):
        token_rewards(torch.zeros(2), torch.zeros(4), torch.tensor([1, 2]), 0.1)
    with pytest.raises(InvalidRequest):
        scale_truncated(torch.zeros(2), torch.tensor([True]), 0.5)
    with pytest.raises(InvalidRequest, match="bool"):
        mask_truncated(torch.tensor([1, 0]), torch.tensor([1, 2]))
