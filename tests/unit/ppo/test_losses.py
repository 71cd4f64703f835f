"""The losses against a loop over tokens, their gradients, and their independence of the split into micro-batches."""

from __future__ import annotations

import math
from typing import Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.losses import kl_loss, policy_loss, value_loss
from tests.unit.ppo.batches import check, draw, draw_mask, gradient, seeds

sizes = st.integers(1, 40)
DUAL = pytest.mark.parametrize("dual_clip", [0.0, 1.5])


def policy_term(new: float, old: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, bool]:
    """One token's loss, and whether a clip decided it."""
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, bounded * advantage)
    decided = bounded * advantage < ratio * advantage
    if dual and advantage < 0 and objective < dual * advantage:
        objective, decided = dual * advantage, True
    return -objective, decided


@DUAL
@check
@given(tokens=sizes, seed=seeds)
def test_the_policy_loss_follows_its_definition(dual_clip: float, tokens: int, seed: int) -> None:
    new, old, advantages = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    mask = draw_mask(seed + 3, tokens)
    kept = [
        row
        for *row, counts in zip(new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True)
        if counts
    ]
    terms = [policy_term(n, o, a, 0.2, 0.28, dual_clip) for n, o, a in kept]
    result = policy_loss(new, old, advantages, mask, 0.2, 0.28, dual_clip, 17)
    assert result.loss.item() == pytest.approx(sum(loss for loss, _ in terms) / 17, rel=1e-4, abs=1e-5)
    assert result.clipped_tokens.item() == sum(decided for _, decided in terms)
    approx_kl = sum(math.exp(n - o) - 1 - (n - o) for n, o, _ in kept)
    assert result.approx_kl_sum.item() == pytest.approx(approx_kl, rel=1e-4, abs=1e-5)


def one_token(ratio: float, advantage: float, dual_clip: float = 0.0) -> tuple[float, int, float]:
    """Loss, clipped tokens and d loss / d log-prob of one token of that ratio."""
    old = torch.tensor([math.log(0.1)])
    new = (old + math.log(ratio)).requires_grad_()
    result = policy_loss(new, old, torch.tensor([advantage]), torch.ones(1), 0.2, 0.2, dual_clip, 1)
    result.loss.backward()
    assert new.grad is not None
    return result.loss.item(), int(result.clipped_tokens.item()), new.grad.item()


def test_the_chapters_clipped_objective_is_2_4_and_not_2_6() -> None:
    # Old probability 0.10, new 0.13, A = 2: the ratio 1.3 counts as 1.2.
    loss, clipped, grad = one_token(0.13 / 0.10, 2.0)
    assert loss == pytest.approx(-2.4)
    assert clipped == 1
    assert grad == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped", "grad"),
    [
        (1.1, 2.0, 0.0, -2.2, 0, -2.2),
        (0.7, 2.0, 0.0, -1.4, 0, -1.4),  # outside, but the way back is open
        (0.7, -2.0, 0.0, 1.6, 1, 0.0),
        (1.3, -2.0, 0.0, 2.6, 0, 2.6),
        (4.0, -2.0, 0.0, 8.0, 0, 8.0),
        (4.0, -2.0, 3.0, 6.0, 1, 0.0),  # the dual clip
        (2.0, -2.0, 3.0, 4.0, 0, 4.0),
        (4.0, 2.0, 3.0, -2.4, 1, 0.0),  # the dual clip leaves good actions alone
        (1.0, 0.0, 3.0, 0.0, 0, 0.0),
    ],
)
def test_one_token_worked_by_hand(
    ratio: float, advantage: float, dual_clip: float, loss: float, clipped: int, grad: float
) -> None:
    found = one_token(ratio, advantage, dual_clip)
    assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert found[1] == clipped
    assert found[2] == pytest.approx(grad, rel=1e-5, abs=1e-7)


@DUAL
@check
@given(tokens=sizes, seed=seeds)
def test_the_gradient_is_zero_exactly_where_a_clip_decides(dual_clip: float, tokens: int, seed: int) -> None:
    new, old, advantages = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    mask = draw_mask(seed + 3, tokens)
    found = gradient(lambda x: policy_loss(x, old, advantages, mask, 0.2, 0.2, dual_clip, 3).loss, new)
    for grad, n, o, a, counts in zip(
        found, new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        _, decided = policy_term(n, o, a, 0.2, 0.2, dual_clip)
        expected = 0.0 if decided or not counts else -a * math.exp(n - o) / 3
        assert grad == pytest.approx(expected, rel=1e-4, abs=1e-7)


def parts(seed: int, tokens: int) -> list[Tensor]:
    """Indices of 0..tokens in random order, cut into random micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(tokens, generator=generator)
    cuts = torch.randint(1, tokens, (3,), generator=generator).unique().tolist() if tokens > 1 else []
    return list(torch.tensor_split(order, cuts))


@check
@given(sizes, seeds)
def test_losses_and_gradients_do_not_depend_on_the_split_into_micro_batches(tokens: int, seed: int) -> None:
    x, y, z = draw(seed, tokens, 0.5), draw(seed + 1, tokens, 0.5), draw(seed + 2, tokens)
    mask = draw_mask(seed + 3, tokens)
    everything = torch.arange(tokens)

    def actor(leaf: Tensor, chosen: Tensor) -> Tensor:
        rows = (leaf[chosen], y[chosen], z[chosen], mask[chosen])
        result = policy_loss(*rows, 0.2, 0.2, 3.0, float(mask.sum()))
        return result.loss + kl_loss(leaf[chosen], y[chosen], mask[chosen], "k3", float(mask.sum()))

    def critic(leaf: Tensor, chosen: Tensor) -> Tensor:
        return value_loss(leaf[chosen], y[chosen], z[chosen], 0.2, tokens).loss

    for loss in (actor, critic):
        whole = gradient(lambda leaf, loss=loss: loss(leaf, everything), x)  # type: ignore[misc]
        leaf = x.clone().requires_grad_()
        total = 0.0
        for chosen in parts(seed, tokens):
            part = loss(leaf, chosen)
            part.backward()
            total += part.item()
        assert leaf.grad is not None
        assert total == pytest.approx(loss(x, everything).item(), rel=1e-4, abs=1e-5)
        assert leaf.grad.tolist() == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_the_first_mini_batch_of_an_unchanged_policy_is_the_mean_advantage() -> None:
    log_probs, advantages = draw(0, 50), draw(1, 50)
    result = policy_loss(log_probs, log_probs.clone(), advantages, torch.ones(50), 0.2, 0.2, 3.0, 50)
    assert result.loss.item() == pytest.approx(-advantages.double().mean().item(), rel=1e-5)
    assert result.clipped_tokens.item() == 0
    assert result.approx_kl_sum.item() == 0.0


def test_what_the_mask_leaves_out_reaches_neither_loss_nor_gradient() -> None:
    bad, mask = torch.tensor([0.1, math.nan, -math.inf]), torch.tensor([1.0, 0.0, 0.0])

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, torch.zeros(3), bad, mask, 0.2, 0.2, 3.0, 1).loss + kl_loss(x, bad, mask, "k3", 1)

    assert loss(bad).isfinite()
    grads = gradient(loss, bad)
    assert math.isfinite(grads[0])
    assert grads[1:] == [0.0, 0.0]
    result = policy_loss(bad, torch.zeros(3), bad, mask, 0.2, 0.2, 3.0, 1)
    assert result.approx_kl_sum.item() == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)


def test_a_fully_masked_micro_batch_adds_nothing() -> None:
    zeros = torch.zeros(4)
    assert policy_loss(draw(0, 4), draw(1, 4), draw(2, 4), zeros, 0.2, 0.2, 3.0, 10).loss.item() == 0.0
    assert (
        gradient(lambda x: policy_loss(x, draw(1, 4), draw(2, 4), zeros, 0.2, 0.2, 3.0, 10).loss, draw(0, 4))
        == [0.0] * 4
    )


def test_absurd_ratios_stay_finite() -> None:
    new, old = torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])
    result = policy_loss(new, old, torch.tensor([1.0, -1.0]), torch.ones(2), 0.2, 0.2, 0.0, 2)
    assert result.loss.item() == pytest.approx((math.exp(20) - math.exp(-20)) / 2)
    assert result.approx_kl_sum.isfinite()


def test_only_the_loss_carries_a_gradient() -> None:
    x = draw(0, 4).requires_grad_()
    actor = policy_loss(x, draw(1, 4), draw(2, 4), torch.ones(4), 0.2, 0.2, 3.0, 4)
    critic = value_loss(x, draw(1, 4), draw(2, 4), 0.2, 4)
    assert actor.loss.requires_grad
    assert critic.loss.requires_grad
    assert not any(t.requires_grad for t in (actor.clipped_tokens, actor.approx_kl_sum, critic.clipped_tokens))


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
@check
@given(tokens=sizes, seed=seeds)
def test_the_value_loss_and_its_gradient_follow_the_definition(value_clip: float, tokens: int, seed: int) -> None:
    new, old, returns = draw(seed, tokens), draw(seed + 1, tokens), draw(seed + 2, tokens)
    total, clipped, grads = 0.0, 0, []
    for v, before, r in zip(new.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = min(max(v, before - value_clip), before + value_clip) if value_clip else v
        total += max((v - r) ** 2, (near - r) ** 2) / 2
        decided = (near - r) ** 2 > (v - r) ** 2
        clipped += decided
        grads.append(0.0 if decided else (v - r) / 11)
    result = value_loss(new, old, returns, value_clip, 11)
    assert result.loss.item() == pytest.approx(total / 11, rel=1e-4, abs=1e-6)
    assert result.clipped_tokens.item() == clipped
    found = gradient(lambda x: value_loss(x, old, returns, value_clip, 11).loss, new)
    assert found == pytest.approx(grads, rel=1e-4, abs=1e-6)


def test_a_value_that_ran_ahead_of_its_clip_waits() -> None:
    # V went from 0 to 1 towards R = 2, the clip allows 0.2: 1/2 (0.2 - 2)^2 = 1.62, and no gradient.
    result = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), 0.2, 1)
    assert result.loss.item() == pytest.approx(1.62)
    assert result.clipped_tokens.item() == 1


@pytest.mark.parametrize("kind", ["k2", "k3"])
@check
@given(tokens=sizes, seed=seeds)
def test_the_kl_loss_and_its_gradient_follow_the_definition(kind: Literal["k2", "k3"], tokens: int, seed: int) -> None:
    new, reference, mask = draw(seed, tokens), draw(seed + 1, tokens), draw_mask(seed + 2, tokens)
    total, grads = 0.0, []
    for n, r, counts in zip(new.tolist(), reference.tolist(), mask.tolist(), strict=True):
        d = n - r
        total += counts * (d * d / 2 if kind == "k2" else math.exp(-d) - 1 + d)
        grads.append(counts * (d if kind == "k2" else 1 - math.exp(-d)) / 7)
    assert kl_loss(new, reference, mask, kind, 7).item() == pytest.approx(total / 7, rel=1e-4, abs=1e-6)
    found = gradient(lambda x: kl_loss(x, reference, mask, kind, 7), new)
    assert found == pytest.approx(grads, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("denominator", [0, -1, math.nan])
def test_a_denominator_that_counts_nothing_is_refused(denominator: float) -> None:
    one = torch.ones(1)
    with pytest.raises(InvalidRequest, match="denominator"):
        policy_loss(one, one, one, one, 0.2, 0.2, 0.0, denominator)
    with pytest.raises(InvalidRequest, match="denominator"):
        value_loss(one, one, one, 0.2, denominator)
    with pytest.raises(InvalidRequest, match="denominator"):
        kl_loss(one, one, one, "k2", denominator)


def test_settings_and_shapes_that_cannot_be_meant_are_refused() -> None:
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(InvalidRequest, match="dual_clip"):
        policy_loss(one, one, one, one, 0.2, 0.2, 0.5, 1)
    with pytest.raises(InvalidRequest, match="value_clip"):
        value_loss(one, one, one, -0.2, 1)
    with pytest.raises(InvalidRequest, match="same length"):
        policy_loss(two, two, one, two, 0.2, 0.2, 0.0, 1)
    with pytest.raises(InvalidRequest, match="same length"):
        value_loss(two[:, None], two[:, None], two, 0.2, 1)
    with pytest.raises(InvalidRequest, match="same length"):
        kl_loss(two, one, two, "k2", 1)
