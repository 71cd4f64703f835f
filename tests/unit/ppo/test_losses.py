"""Losses and their gradients, compared with loops over tokens. They do not depend on the split into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.contract.update import LossAggregation, RatioLevel
from quartet.errors import InvalidRequest
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.losses import (
    PolicyLoss,
    PolicyLossInput,
    kl_loss,
    loss_weights,
    value_loss,
    weighted_sum,
)
from quartet.ppo.policy_losses import clipped
from tests.unit.ppo.batches import draw, draw_mask, gradient, ragged_lengths, seeds, split

sizes = st.integers(1, 40)
DUAL = pytest.mark.parametrize("dual_clip", [0.0, 1.5])
LEVEL = pytest.mark.parametrize("level", ["token", "sequence"])
AGGREGATION = pytest.mark.parametrize("aggregation", get_args(LossAggregation))
DIVISOR = 7.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    lengths: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    ratio_level: RatioLevel,
) -> PolicyLoss:
    """Return the clipped loss of tokens that are in the mask exactly if their weight is not 0."""
    tensors = (log_probs, old_log_probs, old_log_probs, advantages, weights != 0, weights, lengths)
    return clipped(PolicyLossInput(*tensors, clip_low, clip_high, dual_clip, ratio_level))


def policy_term(new: float, old: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, bool]:
    """Return the loss of one token, and whether a clip is active."""
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, bounded * advantage)
    is_clipped = bounded * advantage < ratio * advantage
    if dual and advantage < 0 and objective < dual * advantage:
        objective, is_clipped = dual * advantage, True
    return -objective, is_clipped


def weights_by_definition(mask: list[list[float]], aggregation: LossAggregation) -> list[list[float]]:
    """Return the weights by their definition, one response at a time."""
    counts = [sum(value != 0 for value in row) for row in mask]
    total, responses = sum(counts), sum(count > 0 for count in counts)
    share = [
        {
            "token_mean": 1 / total,
            "sequence_mean": 1 / (max(count, 1) * responses),
            "token_sum": 1.0,
            "sequence_mean_token_sum": 1 / responses,
            "sequence_mean_token_sum_norm": 1 / (len(mask) * DIVISOR),
        }[aggregation]
        for count in counts
    ]
    return [[s if value != 0 else 0.0 for value in row] for s, row in zip(share, mask, strict=True)]


@AGGREGATION
@given(lengths=ragged_lengths, seed=seeds)
def test_loss_weights_follow_their_definition(aggregation: LossAggregation, lengths: list[int], seed: int) -> None:
    mask = draw_mask(seed, sum(lengths))
    weights = loss_weights(mask, torch.tensor(lengths), aggregation, DIVISOR)
    expected = weights_by_definition(split(mask, lengths), aggregation)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([value for row in expected for value in row])
    if aggregation in ("token_mean", "sequence_mean"):
        assert weights.sum().item() == pytest.approx(1.0)


def test_loss_weights_of_a_worked_example() -> None:
    # Two tokens of the first response count, one of the second, none of the third.
    mask, lengths = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([3, 1, 2])
    by_name = {name: loss_weights(mask, lengths, name, 10.0).tolist() for name in get_args(LossAggregation)}
    counted = [1, 0, 1, 1, 0, 0]
    assert by_name["token_mean"] == pytest.approx([value / 3 for value in counted])
    assert by_name["sequence_mean"] == pytest.approx([1 / 4, 0, 1 / 4, 1 / 2, 0, 0])
    assert by_name["token_sum"] == counted
    # Two responses have a counted token.
    assert by_name["sequence_mean_token_sum"] == pytest.approx([value / 2 for value in counted])
    # The masked response counts: 3 responses times the divisor 10.
    assert by_name["sequence_mean_token_sum_norm"] == pytest.approx([value / 30 for value in counted])


@AGGREGATION
def test_all_weights_are_zero_if_no_token_counts(aggregation: LossAggregation) -> None:
    assert loss_weights(torch.zeros(3), torch.tensor([2, 1]), aggregation, DIVISOR).tolist() == [0.0, 0.0, 0.0]


@LEVEL
@AGGREGATION
@DUAL
@given(lengths=ragged_lengths, seed=seeds)
def test_the_policy_loss_follows_its_definition(
    level: RatioLevel, aggregation: LossAggregation, dual_clip: float, lengths: list[int], seed: int
) -> None:
    tokens, sizes = sum(lengths), torch.tensor(lengths)
    new, old, mask = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw_mask(seed + 3, tokens)
    # At level "sequence" a response has one advantage. At level "token" each token may have a different one.
    advantages = (
        draw(seed + 2, tokens) if level == "token" else broadcast_to_tokens(draw(seed + 2, len(lengths)), sizes)
    )
    result = policy_loss(
        new, old, advantages, loss_weights(mask, sizes, aggregation, DIVISOR), sizes, 0.2, 0.28, dual_clip, level
    )

    loss, clipped, approx_kl = 0.0, 0, 0.0
    weights = weights_by_definition(split(mask, lengths), aggregation)
    columns = (split(column, lengths) for column in (new, old, advantages))
    for n_row, o_row, a_row, w_row in zip(*columns, weights, strict=True):
        counted = [(n, o, a, w) for n, o, a, w in zip(n_row, o_row, a_row, w_row, strict=True) if w]
        approx_kl += sum(math.exp(n - o) - 1 - (n - o) for n, o, _, _ in counted)
        if level == "sequence" and counted:
            # The response is one action, with the sum of its log-probs, one advantage, and the sum of its tokens' weights.
            together = (
                sum(n for n, *_ in counted),
                sum(o for _, o, *_ in counted),
                counted[0][2],
                sum(w for *_, w in counted),
            )
            term, is_clipped = policy_term(*together[:3], 0.2, 0.28, dual_clip)
            loss, clipped = loss + together[3] * term, clipped + is_clipped * len(counted)
        if level == "token":
            for n, o, a, w in counted:
                term, is_clipped = policy_term(n, o, a, 0.2, 0.28, dual_clip)
                loss, clipped = loss + w * term, clipped + is_clipped
    assert result.loss.item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert result.clipped_tokens.item() == clipped
    assert result.approx_kl_sum.item() == pytest.approx(approx_kl, rel=1e-4, abs=1e-5)


def test_a_worked_example_with_one_ratio_per_response() -> None:
    # The first response has log-ratios 0.1 and 0.2, so its ratio e^0.3 is clipped to 1.2. The second has -0.05.
    old, lengths = torch.zeros(3), torch.tensor([2, 1])
    new, advantages = torch.tensor([0.1, 0.2, -0.05], requires_grad=True), torch.tensor([1.0, 1.0, -3.0])
    weights = loss_weights(torch.ones(3), lengths, "sequence_mean")
    result = policy_loss(new, old, advantages, weights, lengths, 0.2, 0.2, 0.0, "sequence")
    assert result.loss.item() == pytest.approx((-1.2 + 3 * math.exp(-0.05)) / 2)
    assert result.clipped_tokens.item() == 2
    result.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 1.5 * math.exp(-0.05)])


def test_at_sequence_level_the_first_step_has_the_gradient_of_rloo() -> None:
    # At ratio 1 the loss is the mean over responses of -A sum_t log pi(t): each token gets -A / responses.
    lengths = torch.tensor([3, 1])
    log_probs, advantages = draw(0, 4), torch.tensor([2.0, 2.0, 2.0, -1.0])
    weights = loss_weights(torch.ones(4), lengths, "sequence_mean")
    result = gradient(
        lambda x: policy_loss(x, log_probs, advantages, weights, lengths, 0.2, 0.2, 0.0, "sequence").loss, log_probs
    )
    assert result == pytest.approx([-1.0, -1.0, -1.0, 0.5])


def one_token(ratio: float, advantage: float, dual_clip: float = 0.0) -> tuple[float, int, float]:
    """Return loss, clipped tokens and d loss / d log-prob of one token with this ratio."""
    old = torch.tensor([math.log(0.1)])
    new = (old + math.log(ratio)).requires_grad_()
    result = policy_loss(
        new, old, torch.tensor([advantage]), torch.ones(1), torch.tensor([1]), 0.2, 0.2, dual_clip, "token"
    )
    result.loss.backward()
    assert new.grad is not None
    return result.loss.item(), int(result.clipped_tokens.item()), new.grad.item()


def test_a_worked_example_clips_the_objective_to_2_4() -> None:
    # Old probability 0.10, new 0.13, A = 2: the ratio 1.3 is clipped to 1.2.
    loss, clipped, grad = one_token(0.13 / 0.10, 2.0)
    assert loss == pytest.approx(-2.4)
    assert clipped == 1
    assert grad == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped", "grad"),
    [
        (1.1, 2.0, 0.0, -2.2, 0, -2.2),
        (0.7, 2.0, 0.0, -1.4, 0, -1.4),  # outside the range, but the gradient leads back
        (0.7, -2.0, 0.0, 1.6, 1, 0.0),
        (1.3, -2.0, 0.0, 2.6, 0, 2.6),
        (4.0, -2.0, 0.0, 8.0, 0, 8.0),
        (4.0, -2.0, 3.0, 6.0, 1, 0.0),  # the dual clip
        (2.0, -2.0, 3.0, 4.0, 0, 4.0),
        (4.0, 2.0, 3.0, -2.4, 1, 0.0),  # the dual clip does not apply to positive advantages
        (1.0, 0.0, 3.0, 0.0, 0, 0.0),
    ],
)
def test_worked_examples_with_one_token(
    ratio: float, advantage: float, dual_clip: float, loss: float, clipped: int, grad: float
) -> None:
    result = one_token(ratio, advantage, dual_clip)
    assert result[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert result[1] == clipped
    assert result[2] == pytest.approx(grad, rel=1e-5, abs=1e-7)


@DUAL
@given(tokens=sizes, seed=seeds)
def test_the_gradient_is_zero_exactly_if_a_clip_is_active(dual_clip: float, tokens: int, seed: int) -> None:
    new, old, advantages = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    mask = draw_mask(seed + 3, tokens)
    one = torch.tensor([tokens])
    result = gradient(lambda x: policy_loss(x, old, advantages, mask / 3, one, 0.2, 0.2, dual_clip, "token").loss, new)
    for grad, n, o, a, counts in zip(
        result, new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        _, is_clipped = policy_term(n, o, a, 0.2, 0.2, dual_clip)
        expected = 0.0 if is_clipped or not counts else -a * math.exp(n - o) / 3
        assert grad == pytest.approx(expected, rel=1e-4, abs=1e-7)


def parts(seed: int, count: int) -> list[Tensor]:
    """Return the indices below ``count`` in random order, split into random parts."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    cuts = torch.randint(1, count, (3,), generator=generator).unique().tolist() if count > 1 else []
    return list(torch.tensor_split(order, cuts))


def same_whole_as_parts(loss: Callable[[Tensor, Tensor], Tensor], at: Tensor, micro_batches: list[Tensor]) -> None:
    """Check that ``loss(x, indices)`` and its gradient are the sums of those of the micro-batches."""
    everything = torch.arange(len(at))
    expected = gradient(lambda leaf: loss(leaf, everything), at)
    leaf, total = at.clone().requires_grad_(), 0.0
    for part in micro_batches:
        value = loss(leaf, part)
        value.backward()
        total += value.item()
    assert leaf.grad is not None
    assert total == pytest.approx(loss(at, everything).item(), rel=1e-4, abs=1e-5)
    assert leaf.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@LEVEL
@AGGREGATION
@pytest.mark.parametrize("cap", [0.0, 2.0])
@given(lengths=ragged_lengths, seed=seeds)
def test_policy_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    level: RatioLevel, aggregation: LossAggregation, cap: float, lengths: list[int], seed: int
) -> None:
    tokens, sizes = sum(lengths), torch.tensor(lengths)
    new, old, advantages = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    weights = loss_weights(draw_mask(seed + 3, tokens), sizes, aggregation, DIVISOR)
    weighted = weights * draw(seed + 4, tokens).exp().clamp(max=cap) if cap else weights
    of_response = [
        torch.arange(tokens)[end - length : end] for length, end in zip(lengths, sizes.cumsum(0), strict=True)
    ]

    def loss(leaf: Tensor, indices: Tensor) -> Tensor:
        # ``indices`` consist of complete responses, so their lengths follow from the responses.
        own = torch.tensor([len(of_response[row]) for row in response_of[indices].unique_consecutive().tolist()])
        rows = (leaf[indices], old[indices], advantages[indices], weighted[indices], own)
        result = policy_loss(*rows, 0.2, 0.2, 3.0, level)
        penalty = kl_loss(leaf[indices], old[indices], weights[indices], "k3")
        return result.loss + penalty + weighted_sum(leaf[indices].square(), weights[indices])

    response_of = broadcast_to_tokens(torch.arange(len(lengths)), sizes)
    micro_batches = [torch.cat([of_response[row] for row in part.tolist()]) for part in parts(seed, len(lengths))]
    same_whole_as_parts(loss, new, micro_batches)


@given(sizes, seeds)
def test_value_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(tokens: int, seed: int) -> None:
    x, y, z = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    same_whole_as_parts(
        lambda leaf, part: value_loss(leaf[part], y[part], z[part], 0.2, tokens).loss, x, parts(seed, tokens)
    )


def test_the_first_mini_batch_of_an_unchanged_policy_is_the_mean_advantage() -> None:
    log_probs, advantages = draw(0, 50), draw(1, 50)
    weights = torch.full((50,), 1 / 50)
    result = policy_loss(log_probs, log_probs.clone(), advantages, weights, torch.tensor([50]), 0.2, 0.2, 3.0, "token")
    assert result.loss.item() == pytest.approx(-advantages.double().mean().item(), rel=1e-5)
    assert result.clipped_tokens.item() == 0
    assert result.approx_kl_sum.item() == 0.0


@LEVEL
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_tokens_of_weight_zero_affect_neither_loss_nor_gradient(level: RatioLevel, kind: Literal["k2", "k3"]) -> None:
    bad, weights, lengths = torch.tensor([0.1, math.nan, -math.inf]), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3])

    def loss(x: Tensor) -> Tensor:
        surrogate = policy_loss(x, torch.zeros(3), bad, weights, lengths, 0.2, 0.2, 3.0, level).loss
        return surrogate + kl_loss(x, bad, weights, kind) + weighted_sum(x, weights)

    assert loss(bad).isfinite()
    grads = gradient(loss, bad)
    assert math.isfinite(grads[0])
    assert grads[1:] == [0.0, 0.0]
    result = policy_loss(bad, torch.zeros(3), bad, weights, lengths, 0.2, 0.2, 3.0, level)
    assert result.loss.item() == pytest.approx(-0.1 * math.exp(0.1), rel=1e-5)
    assert result.approx_kl_sum.item() == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)


@LEVEL
def test_a_nan_at_a_counted_token_makes_the_loss_nan(level: RatioLevel) -> None:
    new = torch.tensor([0.1, math.nan])
    weights = torch.full((2,), 0.5)
    result = policy_loss(new, torch.zeros(2), torch.ones(2), weights, torch.tensor([2]), 0.2, 0.2, 0.0, level)
    assert result.loss.isnan()


@LEVEL
def test_a_fully_masked_micro_batch_adds_nothing(level: RatioLevel) -> None:
    zeros, lengths = torch.zeros(4), torch.tensor([1, 3])

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, draw(1, 4), draw(2, 4), zeros, lengths, 0.2, 0.2, 3.0, level).loss

    assert loss(draw(0, 4)).item() == 0.0
    assert gradient(loss, draw(0, 4)) == [0.0] * 4


@LEVEL
def test_extreme_ratios_give_a_finite_loss(level: RatioLevel) -> None:
    new, old = torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])
    weights, lengths = torch.full((2,), 0.5), torch.tensor([1, 1])
    result = policy_loss(new, old, torch.tensor([1.0, -1.0]), weights, lengths, 0.2, 0.2, 0.0, level)
    assert result.loss.item() == pytest.approx((math.exp(20) - math.exp(-20)) / 2)
    assert result.approx_kl_sum.isfinite()


def test_only_the_loss_has_a_gradient() -> None:
    x = draw(0, 4).requires_grad_()
    actor = policy_loss(x, draw(1, 4), draw(2, 4), torch.ones(4), torch.tensor([4]), 0.2, 0.2, 3.0, "token")
    critic = value_loss(x, draw(1, 4), draw(2, 4), 0.2, 4)
    assert actor.loss.requires_grad
    assert critic.loss.requires_grad
    assert not any(t.requires_grad for t in (actor.clipped_tokens, actor.approx_kl_sum, critic.clipped_tokens))


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
@given(tokens=sizes, seed=seeds)
def test_the_value_loss_and_its_gradient_follow_the_definition(value_clip: float, tokens: int, seed: int) -> None:
    new, old, returns = draw(seed, tokens), draw(seed + 1, tokens), draw(seed + 2, tokens)
    total, clipped, grads = 0.0, 0, []
    for v, before, r in zip(new.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = min(max(v, before - value_clip), before + value_clip) if value_clip else v
        total += max((v - r) ** 2, (near - r) ** 2) / 2
        is_clipped = (near - r) ** 2 > (v - r) ** 2
        clipped += is_clipped
        grads.append(0.0 if is_clipped else (v - r) / 11)
    result = value_loss(new, old, returns, value_clip, 11)
    assert result.loss.item() == pytest.approx(total / 11, rel=1e-4, abs=1e-6)
    assert result.clipped_tokens.item() == clipped
    actual = gradient(lambda x: value_loss(x, old, returns, value_clip, 11).loss, new)
    assert actual == pytest.approx(grads, rel=1e-4, abs=1e-6)


def test_a_value_beyond_its_clip_has_no_gradient() -> None:
    # V changed from 0 to 1, R = 2, and the clip allows 0.2: 1/2 (0.2 - 2)^2 = 1.62, without a gradient.
    result = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), 0.2, 1)
    assert result.loss.item() == pytest.approx(1.62)
    assert result.clipped_tokens.item() == 1


@pytest.mark.parametrize("kind", ["k2", "k3"])
@given(tokens=sizes, seed=seeds)
def test_the_kl_loss_and_its_gradient_follow_the_definition(kind: Literal["k2", "k3"], tokens: int, seed: int) -> None:
    new, reference, mask = draw(seed, tokens), draw(seed + 1, tokens), draw_mask(seed + 2, tokens)
    assert kl_loss(new, reference, mask, kind).item() == pytest.approx(
        7 * kl_loss(new, reference, mask / 7, kind).item()
    )
    total, grads = 0.0, []
    for n, r, counts in zip(new.tolist(), reference.tolist(), mask.tolist(), strict=True):
        d = n - r
        total += counts * (d * d / 2 if kind == "k2" else math.exp(-d) - 1 + d)
        grads.append(counts * (d if kind == "k2" else 1 - math.exp(-d)) / 7)
    assert kl_loss(new, reference, mask / 7, kind).item() == pytest.approx(total / 7, rel=1e-4, abs=1e-6)
    result = gradient(lambda x: kl_loss(x, reference, mask / 7, kind), new)
    assert result == pytest.approx(grads, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("divisor", "expected"), [((), 0.5), ((0.5,), 1.0)])
def test_the_divisor_is_1_by_default_and_may_be_less(divisor: tuple[float, ...], expected: float) -> None:
    weights = loss_weights(torch.ones(3), torch.tensor([2, 1]), "sequence_mean_token_sum_norm", *divisor)
    assert weights.tolist() == [expected] * 3


@pytest.mark.parametrize("denominator", [0, -1, math.nan])
def test_a_denominator_of_zero_is_refused(denominator: float) -> None:
    one = torch.ones(1)
    with pytest.raises(InvalidRequest, match="denominator"):
        value_loss(one, one, one, 0.2, denominator)


def test_invalid_settings_and_shapes_are_refused() -> None:
    one, two, lengths = torch.ones(1), torch.ones(2), torch.tensor([1])
    with pytest.raises(InvalidRequest, match="dual_clip"):
        policy_loss(one, one, one, one, lengths, 0.2, 0.2, 1.0, "token")
    with pytest.raises(InvalidRequest, match="value_clip"):
        value_loss(one, one, one, -0.2, 1)
    with pytest.raises(InvalidRequest, match="same length"):
        policy_loss(two, two, one, two, lengths, 0.2, 0.2, 0.0, "token")
    with pytest.raises(InvalidRequest, match="add up to 1"):
        policy_loss(two, two, two, two, lengths, 0.2, 0.2, 0.0, "sequence")
    with pytest.raises(InvalidRequest, match="same length"):
        value_loss(two[:, None], two[:, None], two, 0.2, 1)
    with pytest.raises(InvalidRequest, match="same length"):
        kl_loss(two, one, two, "k2")
    with pytest.raises(InvalidRequest, match="same length"):
        weighted_sum(two, one)
    with pytest.raises(InvalidRequest, match="add up to 1"):
        loss_weights(two, lengths, "token_mean")
    with pytest.raises(InvalidRequest, match=r"loss divisor 0\.0: expected more than 0"):
        loss_weights(two, torch.tensor([2]), "sequence_mean_token_sum_norm", 0.0)
    with pytest.raises(InvalidRequest, match="expected bool"):
        PolicyLossInput(one, one, one, one, one, one, lengths)
