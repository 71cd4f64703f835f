"""Correction for the policy that sampled, checked against hand-worked numbers and definitions in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.contract.update import (
    CorrectionLevel,
    CorrectionTreatment,
    RejectionRule,
    RejectionStatistic,
    RolloutCorrection,
)
from quartet.errors import InvalidRequest
from quartet.ppo.losses import loss_weights
from quartet.ppo.rollout_correction import (
    ImportanceWeights,
    geometric_mean_weights,
    importance_metrics,
    importance_ratios,
    importance_weights,
    mean_weight,
    off_policy_tokens,
    rejected_tokens,
)
from tests.unit.ppo.batches import draw, draw_mask, ragged_lengths, seeds, split

# Two responses. The third token of the first one is not in the loss.
LENGTHS = torch.tensor([3, 2])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
RATIOS = torch.tensor([2.0, 0.5, 8.0, 4.0, 1.0])
ROLLOUT = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5])
OLD = ROLLOUT + RATIOS.log()

STATISTICS: tuple[RejectionStatistic, ...] = get_args(RejectionStatistic)
LEVELS: tuple[CorrectionLevel, ...] = get_args(CorrectionLevel)
TREATMENTS: tuple[CorrectionTreatment, ...] = get_args(CorrectionTreatment)


def weights_of(**settings: Any) -> ImportanceWeights:
    return importance_weights(OLD, ROLLOUT, MASK, LENGTHS, RolloutCorrection(**{"level": "token", **settings}))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("none", [1, 1, 0, 1, 1]),
        ("token", [2, 0.5, 0, 4, 1]),
        ("sequence", [1, 1, 0, 4, 4]),
        ("geometric_mean", [1, 1, 0, 2, 2]),
    ],
)
def test_ratios_of_a_worked_example(level: CorrectionLevel, expected: list[float]) -> None:
    assert importance_ratios(OLD, ROLLOUT, MASK, LENGTHS, level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"upper": 2.0}, [2, 0.5, 0, 2, 1]),
        ({"lower": 0.75, "upper": 3.0}, [2, 0.75, 0, 3, 1]),
        ({"lower": 1.5}, [2, 1.5, 0, 4, 1.5]),
        ({"treatment": "mask", "lower": 0.6, "upper": 3.0}, [2, 0, 0, 0, 1]),
        ({"treatment": "mask", "upper": 3.0}, [2, 0.5, 0, 0, 1]),
        ({"treatment": "mask", "lower": 0.6}, [2, 0, 0, 4, 1]),
        ({"treatment": "seq_mask", "lower": 0.9, "upper": 1.5}, [2, 0.5, 0, 0, 0]),
        ({"level": "sequence", "upper": 3.0}, [1, 1, 0, 3, 3]),
        ({"level": "sequence", "treatment": "mask", "upper": 3.0}, [1, 1, 0, 0, 0]),
        ({"level": "geometric_mean", "treatment": "mask", "lower": 1.5, "upper": 3.0}, [0, 0, 0, 2, 2]),
        ({"level": "none"}, [1, 1, 0, 1, 1]),
    ],
    ids=str,
)
def test_weights_of_a_worked_example(settings: dict[str, Any], expected: list[float]) -> None:
    assert weights_of(**settings).weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric_mean"])
def test_a_weight_at_a_bound_is_kept(treatment: CorrectionTreatment, level: CorrectionLevel) -> None:
    ratios = importance_ratios(OLD, ROLLOUT, MASK, LENGTHS, level)
    bounded = importance_ratios(OLD, ROLLOUT, MASK, LENGTHS, "geometric_mean" if treatment == "seq_mask" else level)
    low, high = bounded[MASK != 0].min(), bounded[MASK != 0].max()
    assert weights_of(level=level, treatment=treatment, lower=float(low), upper=float(high)).weights.equal(ratios)


def test_weights_have_no_gradient_and_a_bounded_exponent() -> None:
    old = torch.tensor([0.0, -500.0], requires_grad=True)
    rollout, mask, lengths = torch.tensor([-500.0, 0.0]), torch.ones(2), torch.tensor([1, 1])
    for level in LEVELS[1:]:
        weights = importance_weights(old, rollout, mask, lengths, RolloutCorrection(level, upper=1e30)).weights
        assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
        assert not weights.requires_grad
        assert not importance_ratios(old, rollout, mask, lengths, level).requires_grad
    assert not geometric_mean_weights(old, mask, lengths).requires_grad


def test_the_mean_weight_counts_tokens_or_responses() -> None:
    by_token, by_response = weights_of(upper=2.0), weights_of(level="sequence", upper=2.0)
    assert mean_weight(by_token.weights, MASK, LENGTHS, "token") == pytest.approx((2 + 0.5 + 2 + 1) / 4)
    assert mean_weight(by_response.weights, MASK, LENGTHS, "sequence") == pytest.approx((1 + 2) / 2)


def test_the_geometric_mean_weight_is_over_the_tokens_under_the_mask() -> None:
    weights = torch.tensor([2.0, 0.5, 8.0, 4.0, 1.0])
    assert geometric_mean_weights(weights, MASK, LENGTHS).tolist() == pytest.approx([1, 1, 0, 2, 2])
    weights[4], weights[2] = 0.0, torch.nan
    # verl adds 1e-10: the root of 4e-10.
    assert geometric_mean_weights(weights, MASK, LENGTHS).tolist() == pytest.approx([1, 1, 0, 2e-5, 2e-5])
    weights[0] = torch.nan
    assert geometric_mean_weights(weights, MASK, LENGTHS).isnan().tolist() == [True, True, False, False, False]


def test_the_mean_weight_may_be_small() -> None:
    assert mean_weight(torch.tensor([0.25, 0.75]), torch.ones(2), torch.tensor([1, 1]), "token") == 0.5
    limit = torch.tensor([1e-8], dtype=torch.float64)
    assert mean_weight(limit, torch.ones(1), torch.tensor([1]), "token") == 1, "1e-8 is too small to divide by"
    assert mean_weight(2 * limit, torch.ones(1), torch.tensor([1]), "token") == 2e-8


def test_a_response_outside_the_mask_is_not_in_the_mean_weight() -> None:
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert mean_weight(torch.full((5,), 3.0), mask, LENGTHS, "sequence") == 3


def test_a_batch_without_a_weight_is_not_normalized() -> None:
    assert mean_weight(torch.zeros(5), MASK, LENGTHS, "token") == 1
    assert mean_weight(RATIOS, torch.zeros(5), LENGTHS, "sequence") == 1
    assert mean_weight(torch.full((5,), torch.nan), MASK, LENGTHS, "token") == 1


def test_metrics_of_a_worked_example() -> None:
    correction = RolloutCorrection("token", upper=2.0)
    assert importance_metrics(weights_of(upper=2.0), MASK, LENGTHS, correction) == pytest.approx(
        {
            "importance_weight": 5.5 / 4,
            "importance_weight_max": 4.0,
            "importance_ess": 5.5**2 / (4 * (4 + 0.25 + 4 + 1)),
            "importance_truncated_fraction": 1 / 4,
        }
    )


def test_metrics_of_weights_per_response_count_responses() -> None:
    settings: dict[str, Any] = {"level": "sequence", "treatment": "mask", "lower": 0.9, "upper": 5.0}
    metrics = importance_metrics(weights_of(**settings), MASK, LENGTHS, RolloutCorrection(**settings))
    assert metrics == pytest.approx(
        {
            "importance_weight": (1 + 1 + 4 + 4) / 4,
            "importance_weight_max": 4.0,
            "importance_ess": (1 + 4) ** 2 / (2 * (1 + 16)),
            "importance_masked_fraction": 0.0,
        }
    )


def test_metrics_of_weights_that_are_all_masked() -> None:
    settings: dict[str, Any] = {"treatment": "mask", "lower": 9.0, "upper": 10.0}
    metrics = importance_metrics(weights_of(**settings), MASK, LENGTHS, RolloutCorrection("token", **settings))
    assert (metrics["importance_ess"], metrics["importance_masked_fraction"], metrics["importance_weight"]) == (0, 1, 0)


def test_without_a_correction_all_weights_are_1() -> None:
    metrics = importance_metrics(weights_of(level="none"), MASK, LENGTHS, RolloutCorrection("none"))
    assert metrics == {"importance_weight": 1.0}


def test_metrics_are_absent_without_a_finite_ratio() -> None:
    nothing = ImportanceWeights(torch.full((5,), torch.nan), torch.full((5,), torch.nan))
    assert importance_metrics(nothing, MASK, LENGTHS, RolloutCorrection("token", upper=2.0)) == {}


def definition(old: Tensor, rollout: Tensor, mask: Tensor, lengths: Sequence[int], level: str) -> list[list[float]]:
    """Return the ratios of each sequence, one token after the other."""
    result = []
    columns = (split(values.double(), lengths) for values in (old, rollout, mask))
    for o_row, r_row, m_row in zip(*columns, strict=True):
        kept = [o - r for o, r, m in zip(o_row, r_row, m_row, strict=True) if m]
        total = sum(kept) if level == "sequence" else sum(kept) / max(len(kept), 1)
        row = [
            (math.exp(o - r) if level == "token" else math.exp(total)) if m else 0.0
            for o, r, m in zip(o_row, r_row, m_row, strict=True)
        ]
        result.append(row)
    return result


@pytest.mark.parametrize("level", ["token", "sequence", "geometric_mean"])
@given(lengths=ragged_lengths, seed=seeds)
def test_ratios_follow_their_definition(level: CorrectionLevel, lengths: list[int], seed: int) -> None:
    tokens = sum(lengths)
    old, rollout, mask = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw_mask(seed + 2, tokens)
    result = importance_ratios(old, rollout, mask, torch.tensor(lengths), level)
    expected = [value for row in definition(old, rollout, mask, lengths, level) for value in row]
    assert result.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("statistic", "upper", "rejected"),
    [
        # k1 = -log ratio, with the bounds 1/upper and upper of the ratio.
        ("token_k1", 2.5, [0, 0, 0, 1, 0]),
        ("seq_sum_k1", 3.0, [0, 0, 0, 1, 1]),
        ("seq_mean_k1", 2.5, [0, 0, 0, 0, 0]),
        ("seq_mean_k1", 1.5, [0, 0, 0, 1, 1]),
        # k2 of the tokens: 0.240, 0.240; 0.961, 0.
        ("token_k2", 0.5, [0, 0, 0, 1, 0]),
        ("seq_sum_k2", 0.5, [0, 0, 0, 1, 1]),
        ("seq_mean_k2", 0.23, [1, 1, 0, 1, 1]),
        ("seq_mean_k2", 0.3, [0, 0, 0, 1, 1]),
        ("seq_max_k2", 0.2, [1, 1, 0, 1, 1]),
        # k3 of the tokens: 0.307, 0.193; 1.614, 0.
        ("token_k3", 0.25, [1, 0, 0, 1, 0]),
        ("seq_sum_k3", 0.45, [1, 1, 0, 1, 1]),
        ("seq_mean_k3", 0.45, [0, 0, 0, 1, 1]),
        ("seq_max_k3", 0.31, [0, 0, 0, 1, 1]),
        ("seq_max_k3", 0.3, [1, 1, 0, 1, 1]),
    ],
)
def test_rejection_of_a_worked_example(statistic: RejectionStatistic, upper: float, rejected: list[int]) -> None:
    result = rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, [RejectionRule(statistic, upper)])
    assert result.int().tolist() == rejected


def test_bounds_of_k1_are_those_of_the_ratio_of_engine_to_trainer() -> None:
    # exp(k1) of the tokens: 0.5, 2, 0.25, 1.
    rules = [RejectionRule("token_k1", upper=1.5, lower=0.3)]
    assert rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, rules).int().tolist() == [0, 1, 0, 1, 0]


def test_a_statistic_at_its_bound_rejects_nothing() -> None:
    old = torch.tensor([0.5, 2.0], dtype=torch.float64).log()
    rules = [RejectionRule("token_k1", upper=2.0, lower=0.5), RejectionRule("seq_max_k1", upper=2.0)]
    assert not rejected_tokens(old, torch.zeros(2), torch.ones(2), torch.tensor([1, 1]), rules).any()
    # k2 = 2^2 / 2.
    rules = [RejectionRule("token_k2", upper=2.0)]
    assert not rejected_tokens(torch.tensor([2.0]), torch.zeros(1), torch.ones(1), torch.tensor([1]), rules).any()


def test_equal_bounds_keep_one_ratio() -> None:
    settings: dict[str, Any] = {"treatment": "mask", "lower": 1.0, "upper": 1.0}
    assert weights_of(**settings).weights.tolist() == [0, 0, 0, 0, 1]
    rules = [RejectionRule("token_k1", upper=1.0, lower=1.0)]
    assert rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, rules).int().tolist() == [1, 1, 0, 1, 0]


def test_a_token_is_kept_if_all_rules_keep_it() -> None:
    rules = [RejectionRule("token_k1", upper=2.5), RejectionRule("token_k3", upper=0.25)]
    assert rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, rules).int().tolist() == [1, 0, 0, 1, 0]
    assert not rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, []).any()


@pytest.mark.parametrize("statistic", STATISTICS)
@given(lengths=ragged_lengths, seed=seeds, upper=st.floats(1.01, 3))
def test_rejection_follows_its_definition(
    statistic: RejectionStatistic, lengths: list[int], seed: int, upper: float
) -> None:
    tokens = sum(lengths)
    old, rollout, mask = draw(seed, tokens, 0.7), draw(seed + 1, tokens, 0.7), draw_mask(seed + 2, tokens)
    rules = [RejectionRule(statistic, upper)]
    result = split(rejected_tokens(old, rollout, mask, torch.tensor(lengths), rules), lengths)
    *_, kind = statistic.split("_")
    columns = (split(values.double(), lengths) for values in (old, rollout, mask))
    for o_row, r_row, m_row, row in zip(*columns, result, strict=True):
        values = []
        for o, r in zip(o_row, r_row, strict=True):
            d = o - r
            values.append({"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind])
        kept = [value for value, m in zip(values, m_row, strict=True) if m] or [0.0]
        of_sequence = {"sum": sum(kept), "mean": sum(kept) / len(kept), "max": max(kept)}
        for value, m, is_rejected in zip(values, m_row, row, strict=True):
            number = value if statistic.startswith("token") else of_sequence[statistic.split("_")[1]]
            outside = abs(number) > math.log(upper) if kind == "k1" else number > upper
            assert is_rejected == (bool(m) and outside)


def test_off_policy_masking_of_a_worked_example() -> None:
    # Means of rollout - current over the tokens in the loss: (0.4 + 0.2)/2 = 0.3, (0.1 + 0.1)/2 = 0.1, -0.5.
    lengths, mask = torch.tensor([3, 2, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    rollout = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5, -1.0])
    current = rollout - torch.tensor([0.4, 0.2, 9.0, 0.1, 0.1, -0.5])

    def dropped(advantages: list[float], threshold: float) -> list[int]:
        values = torch.tensor(advantages)
        return off_policy_tokens(current, rollout, values, mask, lengths, threshold).int().tolist()

    negative = [-1.0] * 6
    assert dropped(negative, 0.2) == [1, 1, 0, 0, 0, 0]
    assert dropped(negative, 0.05) == [1, 1, 0, 1, 1, 0]
    assert dropped(negative, 0.31) == [0, 0, 0, 0, 0, 0]
    assert dropped([1.0] * 6, 0.05) == [0, 0, 0, 0, 0, 0], "responses with a positive advantage are kept"
    assert dropped([0.0] * 6, 0.05) == [0, 0, 0, 0, 0, 0], "an advantage of 0 is not negative"
    assert dropped([-1.0, 1.0, -1.0, 1.0, -1.0, -1.0], 0.05) == [1, 0, 0, 0, 1, 0]
    at_bound = (torch.tensor([-1.5]), torch.tensor([-1.0]), -torch.ones(1), torch.ones(1), torch.tensor([1]))
    assert not off_policy_tokens(*at_bound, 0.5).any()
    for value, expected in ((-torch.inf, [1, 1, 0, 0, 0, 0]), (torch.inf, [0] * 6), (torch.nan, [0] * 6)):
        current[1] = value
        assert dropped(negative, 0.2) == expected, "a response that the current policy cannot give is infinitely far"


def test_numbers_outside_the_mask_change_nothing() -> None:
    hidden = MASK == 0
    for value in (torch.nan, -torch.inf, 50.0):
        old, rollout = (torch.where(hidden, value, values) for values in (OLD, ROLLOUT + 0.0))
        for level in LEVELS:
            ratios = importance_ratios(old, ROLLOUT, MASK, LENGTHS, level)
            assert ratios.equal(importance_ratios(OLD, ROLLOUT, MASK, LENGTHS, level))
        for statistic in STATISTICS:
            rules = [RejectionRule(statistic, 1.4)]
            result = rejected_tokens(OLD, rollout, MASK, LENGTHS, rules)
            assert result.equal(rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, rules))
        dropped = off_policy_tokens(old, ROLLOUT, -torch.ones(5), MASK, LENGTHS, 0.1)
        assert dropped.equal(off_policy_tokens(OLD, ROLLOUT, -torch.ones(5), MASK, LENGTHS, 0.1))


def test_a_nan_reaches_the_weights_and_is_never_masked_away() -> None:
    old = OLD.clone()
    old[3] = torch.nan
    for treatment in TREATMENTS:
        correction = RolloutCorrection("token", treatment, 0.9, 1.1)
        assert importance_weights(old, ROLLOUT, MASK, LENGTHS, correction).weights[3].isnan()
    correction = RolloutCorrection("sequence", "mask", 0.9, 1.1)
    assert importance_weights(old, ROLLOUT, MASK, LENGTHS, correction).weights.isnan().tolist() == [
        *[False] * 3,
        True,
        True,
    ]
    for statistic in STATISTICS:
        assert not rejected_tokens(old, ROLLOUT, MASK, LENGTHS, [RejectionRule(statistic, 1.01)])[3]
    assert not off_policy_tokens(old, ROLLOUT, -torch.ones(5), MASK, LENGTHS, 1e-9)[3:].any()


@given(lengths=ragged_lengths, seed=seeds)
def test_a_response_gets_the_same_bits_with_and_without_the_others(lengths: list[int], seed: int) -> None:
    """The reason that the split of a mini-batch into micro-batches and ranks changes nothing."""
    tokens, sizes = sum(lengths), torch.tensor(lengths)
    old, rollout, mask = draw(seed, tokens), draw(seed + 1, tokens), draw_mask(seed + 2, tokens)
    rules = [RejectionRule(statistic, 1.5) for statistic in STATISTICS]
    advantages = draw(seed + 3, tokens)
    for level in LEVELS[1:]:
        correction = RolloutCorrection(level, "mask", 0.5, 2.0)
        whole = importance_weights(old, rollout, mask, sizes, correction).weights
        parts, rejected, dropped, start = [], [], [], 0
        for length in lengths:
            part = slice(start, start + length)
            of_row = (old[part], rollout[part], mask[part], torch.tensor([length]))
            parts.append(importance_weights(*of_row, correction).weights)
            rejected.append(rejected_tokens(*of_row, rules))
            dropped.append(off_policy_tokens(old[part], rollout[part], advantages[part], *of_row[2:], 0.1))
            start += length
        assert torch.cat(parts).equal(whole)
        assert torch.cat(rejected).equal(rejected_tokens(old, rollout, mask, sizes, rules))
        assert torch.cat(dropped).equal(off_policy_tokens(old, rollout, advantages, mask, sizes, 0.1))


@pytest.mark.parametrize(
    "bounds", [{"lower": -1.0}, {"upper": -1.0}, {"lower": 3.0, "upper": 2.0}, {"upper": math.nan}], ids=str
)
def test_bounds_that_exclude_each_other_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="bounds"):
        weights_of(**bounds)


@pytest.mark.parametrize(
    "rule",
    [
        RejectionRule("token_k2", 0.0),
        RejectionRule("token_k2", -1.0),
        RejectionRule("token_k2", math.nan),
        RejectionRule("token_k1", 2.0, 3.0),
        RejectionRule("token_k1", 2.0, -1.0),
        RejectionRule("token_k1", 0.5),
    ],
    ids=str,
)
def test_rules_without_a_range_are_refused(rule: RejectionRule) -> None:
    with pytest.raises(InvalidRequest, match=rule.statistic):
        rejected_tokens(OLD, ROLLOUT, MASK, LENGTHS, [rule])


def test_shapes_that_would_broadcast_are_refused() -> None:
    one, correction = OLD[:1], RolloutCorrection("token", upper=2.0)
    with pytest.raises(InvalidRequest, match="same length"):
        importance_weights(OLD, one, MASK, LENGTHS, correction)
    with pytest.raises(InvalidRequest, match="same length"):
        rejected_tokens(OLD, one, MASK, LENGTHS, [])
    with pytest.raises(InvalidRequest, match="same length"):
        off_policy_tokens(OLD, ROLLOUT, one, MASK, LENGTHS, 0.1)
    with pytest.raises(InvalidRequest, match="same length"):
        mean_weight(OLD, MASK[:1], LENGTHS, "token")


def test_the_decoupled_loss_equals_the_formula_of_areal() -> None:
    """AReaL's use_decoupled_loss: the clipped loss against the proximal policy, times pi_prox/pi_behav, 0 above the cap."""
    new = OLD + torch.tensor([0.3, -0.3, 0.0, 0.1, -0.1])
    advantages = torch.tensor([1.0, -2.0, 5.0, 0.5, -1.5])
    correction = RolloutCorrection("token", "mask", upper=3.0)
    expected, count = 0.0, 0
    for n, prox, behave, advantage, m in zip(
        *(values.tolist() for values in (new, OLD, ROLLOUT, advantages, MASK)), strict=True
    ):
        if not m:
            continue
        count += 1
        ratio, weight = math.exp(n - prox), math.exp(prox - behave)
        per_token = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        expected += per_token * weight if weight <= 3.0 else 0.0
    expected /= count  # The denominator counts the tokens above the cap.
    weights = loss_weights(MASK, LENGTHS, "token_mean")
    weights = weights * importance_weights(OLD, ROLLOUT, MASK, LENGTHS, correction).weights
    ratio = (new - OLD).exp()
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    assert float((per_token * weights).sum()) == pytest.approx(expected, abs=1e-6)
