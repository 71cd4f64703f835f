"""Token rewards, score normalisation, truncated responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.kl import kl_estimate
from quartet.ppo.rewards import mask_truncated, normalize_scores, penalize_truncated, scale_truncated, token_rewards
from tests.unit.ppo.batches import check, draw, gradient, ragged_lengths, seeds, split


@check
@given(ragged_lengths, seeds)
def test_the_score_comes_once_on_the_last_token_and_the_penalty_on_every_token(lengths: list[int], seed: int) -> None:
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
def test_the_chapters_penalties(log_prob: float, reference: float, coefficient: float, penalty: float) -> None:
    kl = kl_estimate(torch.tensor([log_prob, 0.0]), torch.tensor([reference, 0.0]), "k1")
    rewards = token_rewards(torch.tensor([1.0]), kl, torch.tensor([2]), coefficient)
    assert rewards.tolist() == pytest.approx([penalty, 1.0], rel=1e-5)


def test_a_one_token_response_gets_score_and_penalty_together() -> None:
    rewards = token_rewards(torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), 0.5)
    assert rewards.tolist() == [1.5, 3.5]


def test_rewards_leave_kl_as_it_was() -> None:
    kl = torch.ones(2)
    token_rewards(torch.ones(1), kl, torch.tensor([2]), 0.0)
    assert kl.tolist() == [1.0, 1.0]


def test_scores_are_spread_by_the_reference_moments() -> None:
    assert normalize_scores(torch.tensor([1.0, 5.0, 3.0]), mean=3.0, std=2.0).tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_moments_that_cannot_normalise_are_refused(mean: float, std: float) -> None:
    with pytest.raises(InvalidRequest):
        normalize_scores(torch.zeros(2), mean, std)


@check
@given(ragged_lengths, seeds)
def test_only_truncated_responses_are_treated(lengths: list[int], seed: int) -> None:
    scores = draw(seed, len(lengths))
    truncated = draw(seed + 1, len(lengths)) > 0
    pairs = list(zip(scores.tolist(), truncated.tolist(), strict=True))
    penalized = penalize_truncated(scores, truncated, 1.5).tolist()
    assert penalized == pytest.approx([s - 1.5 if cut else s for s, cut in pairs], rel=1e-5, abs=1e-6)
    scaled = scale_truncated(scores, truncated, 0.25).tolist()
    assert scaled == pytest.approx([s * 0.25 if cut else s for s, cut in pairs])
    mask = mask_truncated(truncated, torch.tensor(lengths, dtype=torch.int32))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [
        0.0 if cut else 1.0 for length, cut in zip(lengths, truncated.tolist(), strict=True) for _ in range(length)
    ]


def test_a_truncated_response_sends_no_gradient_through_its_mask() -> None:
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
