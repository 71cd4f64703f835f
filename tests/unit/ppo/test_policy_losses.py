"""The policy losses beside the clipped one: against loops over tokens, worked examples, gradients, splits and masked tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.losses import PolicyLoss, PolicyLossInput, SelectionInput, loss_weights
from quartet.ppo.policy_losses import select_clip_cov, select_kl_cov
from quartet.system.user_code import import_callable
from tests.unit.ppo.batches import draw, draw_mask, gradient, ragged_lengths, seeds, split

OTHERS = [name for name in BUILT_IN_POLICY_LOSSES if name != "clipped"]
NAMES = pytest.mark.parametrize("name", OTHERS)
# Narrow enough for some tokens of random log-probs to be clipped or masked.
CLIPS = {"gspo": (0.05, 0.08), "gspo_token": (0.05, 0.08), "cispo": (0.3, 0.3), "dppo_kl": (0.02, 0.03)}


def loss_of(name: str, inputs: PolicyLossInput) -> PolicyLoss:
    result: PolicyLoss = import_callable(BUILT_IN_POLICY_LOSSES[name].function)(inputs)
    return result


def given_input(
    name: str, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, lengths: list[int], **changes: Any
) -> PolicyLossInput:
    """Return an input with the default parameters and aggregation of the loss."""
    spec = BUILT_IN_POLICY_LOSSES[name]
    low, high = CLIPS.get(name, (spec.clip_low or 0.0, spec.clip_high or 0.0))
    sizes = torch.tensor(lengths)
    weights = loss_weights(mask, sizes, spec.aggregation)
    inputs = PolicyLossInput(
        *(new, old, old, advantages, mask != 0, weights, sizes, low, high), parameters=spec.resolve({})
    )
    return dataclasses.replace(inputs, **changes)


def random_input(name: str, lengths: list[int], seed: int) -> PolicyLossInput:
    """Return random log-probs below 0, and one advantage per response if the loss needs it."""
    tokens = sum(lengths)
    new, old = -draw(seed, tokens).abs(), -draw(seed, tokens).abs()
    new = torch.minimum(new + draw(seed + 1, tokens, 0.4), torch.tensor(-1e-3))
    advantages = draw(seed + 2, tokens)
    if BUILT_IN_POLICY_LOSSES[name].one_advantage_per_response:
        advantages = broadcast_to_tokens(draw(seed + 2, len(lengths)), torch.tensor(lengths))
    selected = draw_mask(seed + 4, tokens) != 0 if name.endswith("_cov") else None
    return given_input(name, new, old, advantages, draw_mask(seed + 3, tokens), lengths, selected=selected)


def term(
    name: str, x: PolicyLossInput, n: float, o: float, a: float, s: float, is_selected: bool
) -> tuple[float, bool]:
    """Return the loss of one token by its formula, and whether it is clipped. ``s``: mean log-ratio of its response."""
    ratio, low, high = math.exp(n - o), 1 - x.clip_low, 1 + x.clip_high
    parameters, p, q = x.parameters, math.exp(n), math.exp(o)
    if name in ("gspo", "gspo_token", "clip_cov"):
        ratio = ratio if name == "clip_cov" else math.exp(s)
        value, bounded = -ratio * a, -min(max(ratio, low), high) * a
        if name == "clip_cov" and is_selected:
            return 0.0, True
        return max(value, bounded), bounded > value
    if name == "cispo":
        return -min(max(ratio, low), high) * a * n, not low <= ratio <= high
    if name == "sapo":
        tau = parameters["tau_positive" if a > 0 else "tau_negative"]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a, False
    if name == "kl_cov":
        return -ratio * a + is_selected * parameters["ppo_kl_coef"] * abs(n - o), is_selected
    if name == "dppo_tv":
        is_masked = p - q > x.clip_high if a > 0 else q - p > x.clip_low
    else:
        assert name == "dppo_kl"
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        is_masked = divergence > (x.clip_high if a > 0 else x.clip_low) and (p > q if a > 0 else p < q)
    return 0.0 if is_masked else -min(ratio, parameters["ratio_cap"]) * a * n, is_masked


def gmpo_response(x: PolicyLossInput, tokens: list[tuple[float, float, float]]) -> tuple[float, int]:
    """Return -A times the geometric mean of the clipped ratios of (new, old, advantage), and the number of clipped tokens."""
    total, clipped = 0.0, 0
    for n, o, a in tokens:
        d, bounded = n - o, min(max(n - o, -x.clip_low), x.clip_high)
        total += min(d, bounded) if a > 0 else max(d, bounded)
        clipped += bounded < d if a > 0 else bounded > d
    return -tokens[0][2] * math.exp(total / len(tokens)), clipped


@NAMES
@given(lengths=ragged_lengths, seed=seeds)
def test_each_loss_follows_its_definition(name: str, lengths: list[int], seed: int) -> None:
    x = random_input(name, lengths, seed)
    result = loss_of(name, x)
    selected = torch.zeros_like(x.mask) if x.selected is None else x.selected
    columns = (x.log_probs, x.old_log_probs, x.advantages, x.weights, selected)
    loss, clipped, approx_kl = 0.0, 0, 0.0
    for rows in zip(*(split(column, lengths) for column in columns), strict=True):
        counted = [token for token in zip(*rows, strict=True) if token[3]]
        approx_kl += sum(math.exp(n - o) - 1 - (n - o) for n, o, *_ in counted)
        if name == "gmpo" and counted:
            value, count = gmpo_response(x, [(n, o, a) for n, o, a, *_ in counted])
            loss, clipped = loss + value * sum(w for *_, w, _ in counted), clipped + count
            continue
        mean = sum(n - o for n, o, *_ in counted) / max(1, len(counted))
        for n, o, a, w, is_selected in counted:
            value, is_clipped = term(name, x, n, o, a, mean, bool(is_selected))
            loss, clipped = loss + w * value, clipped + is_clipped
    assert result.loss.item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert result.clipped_tokens.item() == clipped
    assert result.approx_kl_sum.item() == pytest.approx(approx_kl, rel=1e-4, abs=1e-5)


def one_response(name: str, ratios: list[float], advantage: float, **changes: Any) -> tuple[float, int, list[float]]:
    """Return loss, clipped tokens and gradient of one response with these token ratios. The old probabilities are 0.4."""
    old = torch.full((len(ratios),), math.log(0.4))
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    advantages, mask = torch.full_like(old, advantage), torch.ones_like(old)
    inputs = given_input(name, new, old, advantages, mask, [len(ratios)])
    result = loss_of(name, dataclasses.replace(inputs, **changes))
    result.loss.backward()
    assert new.grad is not None
    return result.loss.item(), int(result.clipped_tokens), new.grad.tolist()


LOG4 = math.log(0.4)
WORKED: dict[str, tuple[str, list[float], float, dict[str, Any], float, int, list[float]]] = {
    # sqrt(1.2 * 1.0) = 1.0954 is above 1.08, and the product 1.2 above 1.2 is not what counts.
    "gspo clips the geometric mean": ("gspo", [1.2, 1.0], 2.0, {}, -2 * 1.08, 2, [0.0, 0.0]),
    # sqrt(1.21 / 1.1) = 1.0488: -A s, and each token gets half of its gradient.
    "gspo within the range": ("gspo", [1.21, 1 / 1.1], 1.0, {}, -math.sqrt(1.1), 0, [-math.sqrt(1.1) / 2] * 2),
    "gspo below the range leads back": ("gspo", [0.81, 1.0], 1.0, {}, -0.9, 0, [-0.45, -0.45]),
    "gspo below the range, negative advantage": ("gspo", [0.81, 1.0], -1.0, {}, 0.95, 2, [0.0, 0.0]),
    "gspo with a dual clip": ("gspo", [4.0, 4.0], -1.0, {"dual_clip": 3.0}, 3.0, 2, [0.0, 0.0]),
    "gspo_token": ("gspo_token", [1.21, 1 / 1.1], 1.0, {}, -math.sqrt(1.1), 0, [-math.sqrt(1.1) / 2] * 2),
    # The weight 2 is limited to 1.3, and the token keeps a gradient: -1.3 A.
    "cispo limits the weight": ("cispo", [2.0], 3.0, {}, -1.3 * 3 * (LOG4 + math.log(2)), 1, [-3.9]),
    "cispo without a lower limit": ("cispo", [0.1], 3.0, {"clip_low": 1.0}, -0.3 * (LOG4 + math.log(0.1)), 0, [-0.3]),
    # At ratio 1: -(4 / tau) A / 2, with gradient -A for every tau.
    "sapo at ratio 1": ("sapo", [1.0], 2.0, {}, -4.0, 0, [-2.0]),
    "sapo, negative advantage": ("sapo", [1.0], -2.1, {}, 4 / 1.05 * 2.1 / 2, 0, [2.1]),
    # sigmoid(1) = 0.731059, slope 0.196612 times ratio 2 times 4.
    "sapo at ratio 2": ("sapo", [2.0], 1.0, {}, -4 * 0.731059, 0, [-4 * 0.196612 * 2]),
    # Log-ratios ln 2 -> 0.4 and -0.2: the mean is 0.1. Only the token within the range has a gradient.
    "gmpo": ("gmpo", [2.0, math.exp(-0.2)], 1.0, {}, -math.exp(0.1), 1, [0.0, -math.exp(0.1) / 2]),
    # For A < 0 the lower limit clips: ln 0.5 -> -0.4.
    "gmpo, negative advantage": ("gmpo", [0.5, 1.0], -1.0, {}, math.exp(-0.2), 1, [0.0, math.exp(-0.2) / 2]),
    "clip_cov drops a selected token": (
        *("clip_cov", [1.1, 1.1], 2.0, {"selected": torch.tensor([True, False])}),
        *(-1.1, 1, [0.0, -1.1]),
    ),
    # -ratio A, and the penalty 0.1 |ln 1.1| at the first token.
    "kl_cov penalizes a selected token": (
        *("kl_cov", [1.1, 1.1], 2.0, {"selected": torch.tensor([True, False])}),
        *(-2.2 + 0.05 * math.log(1.1), 1, [-1.1 + 0.05, -1.1]),
    ),
    # Probability 0.4 -> 0.64: more than 0.2 away, so masked for A > 0 and not for A < 0.
    "dppo_tv masks": ("dppo_tv", [1.6], 1.0, {}, 0.0, 1, [0.0]),
    "dppo_tv keeps the way back": ("dppo_tv", [1.6], -1.0, {}, 1.6 * math.log(0.64), 0, [1.6]),
    "dppo_tv caps the ratio": (
        *("dppo_tv", [1.6], -1.0, {"parameters": {"ratio_cap": 1.5}}),
        *(1.5 * math.log(0.64), 0, [1.5]),
    ),
    # q = 0.4, p = 0.6: 0.4 ln(2/3) + 0.6 ln 1.5 = 0.0811 is more than 0.03.
    "dppo_kl masks": ("dppo_kl", [1.5], 1.0, {}, 0.0, 1, [0.0]),
    "dppo_kl with a wider range": ("dppo_kl", [1.5], 1.0, {"clip_high": 0.082}, -1.5 * math.log(0.6), 0, [-1.5]),
    "dppo_kl keeps the way back": ("dppo_kl", [1.5], -1.0, {}, 1.5 * math.log(0.6), 0, [1.5]),
}


@pytest.mark.parametrize("case", WORKED)
def test_worked_examples(case: str) -> None:
    name, ratios, advantage, changes, loss, clipped, grad = WORKED[case]
    result = one_response(name, ratios, advantage, **changes)
    assert result[0] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert result[1] == clipped
    assert result[2] == pytest.approx(grad, rel=1e-4, abs=1e-7)


def clipped_of(name: str, new: list[float], old: list[float], advantage: float, **changes: Any) -> list[bool]:
    """Return which tokens are clipped, from a loss of each one by itself, with log-probs in float64."""
    counts = []
    for n, o in zip(new, old, strict=True):
        tensors = (torch.tensor([value], dtype=torch.float64) for value in (n, o, advantage, 1.0))
        counts.append(
            int(loss_of(name, dataclasses.replace(given_input(name, *tensors, [1]), **changes)).clipped_tokens)
        )
    return list(map(bool, counts))


def test_a_token_at_a_bound_is_not_clipped() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    clips = {"clip_low": 0.25, "clip_high": 0.25}
    # In float64, exp(log 0.25) and exp(log 0.5) are exact.
    assert clipped_of("dppo_tv", [half, 0.0], [quarter, quarter], 1.0, **clips) == [False, True]
    assert clipped_of("dppo_tv", [quarter, quarter], [half, 0.0], -1.0, **clips) == [False, True]
    # An old probability of 1 leaves the divergence log(q / p) = -log p.
    assert clipped_of("dppo_kl", [-1.0, -1.1], [0.0, 0.0], -1.0, clip_low=1.0) == [False, True]
    # The ratio 4 with the dual clip 4.
    dual = {"dual_clip": 4.0}
    assert clipped_of("clip_cov", [2 * math.log(2), 1.4], [0.0, 0.0], -1.0, **dual) == [False, True]


def test_dppo_kl_compares_the_divergence_and_the_bound_of_the_advantage() -> None:
    new, old = torch.tensor([-0.5], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    p, q = new.exp(), old.exp()
    divergence = float(q * (old - new) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log())
    for bound, expected in ((divergence, False), (divergence * (1 - 1e-12), True)):
        assert clipped_of("dppo_kl", [-0.5], [-1.0], 1.0, clip_high=bound) == [expected]


def test_dppo_masks_probabilities_of_1() -> None:
    """Their logarithm of 0 is kept finite."""
    assert clipped_of("dppo_kl", [-1.0], [0.0], -1.0) == [True], "the old probability is 1"
    assert clipped_of("dppo_kl", [0.0], [-1.0], 1.0) == [True], "the new probability is 1"


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_masks_a_token_of_advantage_0_as_one_of_negative_advantage(name: str) -> None:
    low, high = math.log(0.1), math.log(0.9)
    assert clipped_of(name, [high, low], [low, high], 0.0) == [False, True]


def test_tokens_of_weight_1_have_a_ratio() -> None:
    changes: dict[str, Any] = {"weights": torch.ones(2)}
    assert one_response("clip_cov", [1.1, 0.9], 2.0, **changes)[0] == pytest.approx(-2 * (1.1 + 0.9))


@given(lengths=ragged_lengths, seed=seeds)
def test_gspo_token_has_the_value_and_gradient_of_gspo_if_a_response_has_one_advantage(
    lengths: list[int], seed: int
) -> None:
    x = random_input("gspo", lengths, seed)

    def value(name: str) -> Callable[[Tensor], Tensor]:
        return lambda leaf: loss_of(name, dataclasses.replace(x, log_probs=leaf)).loss

    assert value("gspo")(x.log_probs).item() == pytest.approx(value("gspo_token")(x.log_probs).item(), rel=1e-5)
    expected = gradient(value("gspo"), x.log_probs)
    assert gradient(value("gspo_token"), x.log_probs) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@NAMES
@given(lengths=ragged_lengths, seed=seeds)
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    name: str, lengths: list[int], seed: int
) -> None:
    x = random_input(name, lengths, seed)
    whole = gradient(lambda leaf: loss_of(name, dataclasses.replace(x, log_probs=leaf)).loss, x.log_probs)
    leaf, total, start = x.log_probs.clone().requires_grad_(), 0.0, 0
    for length in lengths:
        part = slice(start, start + length)
        tensors = {
            field.name: value[part]
            for field in dataclasses.fields(x)
            if isinstance(value := getattr(x, field.name), Tensor) and field.name != "lengths"
        }
        result = loss_of(
            name, dataclasses.replace(x, **{**tensors, "log_probs": leaf[part]}, lengths=torch.tensor([length]))
        )
        result.loss.backward()
        total, start = total + result.loss.item(), start + length
    assert leaf.grad is not None
    assert total == pytest.approx(loss_of(name, x).loss.item(), rel=1e-4, abs=1e-5)
    assert leaf.grad.tolist() == pytest.approx(whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_values_outside_the_mask_reach_neither_loss_nor_gradient(name: str, bad: float) -> None:
    new, old, values = torch.tensor([-0.9, bad, bad]), torch.tensor([-1.0, bad, -1.0]), torch.tensor([1.0, bad, bad])
    x = given_input(name, new, old, values, torch.tensor([1.0, 0.0, 0.0]), [3])
    counted = given_input(name, new[:1], old[:1], values[:1], torch.ones(1), [1])
    assert loss_of(name, x).loss.item() == loss_of(name, counted).loss.item()
    assert loss_of(name, x).approx_kl_sum.item() == loss_of(name, counted).approx_kl_sum.item()
    grads = gradient(lambda leaf: loss_of(name, dataclasses.replace(x, log_probs=leaf)).loss, new)
    assert math.isfinite(grads[0])
    assert grads[1:] == [0.0, 0.0]


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
def test_a_token_that_a_correction_masks_adds_nothing(name: str) -> None:
    # A weight of 0 within the mask. It still counts in the ratio of its response, so its log-probs are finite there.
    bad = -1.0 if BUILT_IN_POLICY_LOSSES[name].one_advantage_per_response or name == "gspo_token" else math.nan
    new, old = torch.tensor([-0.9, bad]), torch.tensor([-1.0, -1.0])
    advantages = torch.tensor([1.0, 1.0 if bad == -1 else math.nan])
    x = given_input(name, new, old, advantages, torch.ones(2), [2], weights=torch.tensor([0.5, 0.0]))
    full = dataclasses.replace(x, log_probs=torch.tensor([-0.9, -1.0]), advantages=torch.ones(2))
    assert loss_of(name, x).loss.item() == loss_of(name, full).loss.item()
    assert all(
        map(math.isfinite, gradient(lambda leaf: loss_of(name, dataclasses.replace(x, log_probs=leaf)).loss, new))
    )


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
def test_a_nan_at_a_counted_token_makes_the_loss_nan(name: str) -> None:
    new = torch.tensor([-0.9, math.nan])
    x = given_input(name, new, torch.full((2,), -1.0), torch.ones(2), torch.ones(2), [2])
    assert loss_of(name, x).loss.isnan()


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
def test_extreme_log_probs_and_a_fully_masked_response_give_finite_gradients(name: str) -> None:
    new, old = torch.tensor([-500.0, -1e-4, -1.0]), torch.tensor([-1e-4, -500.0, -2.0])
    for mask in (torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3)):
        for sign in (1.0, -1.0):
            x = given_input(name, new, old, torch.full((3,), sign), mask, [2, 1])
            grads = gradient(lambda leaf, x=x: loss_of(name, dataclasses.replace(x, log_probs=leaf)).loss, new)
            assert all(map(math.isfinite, grads))
            assert mask.any() or grads == [0.0] * 3


def selection(values: list[float], advantages: list[float], **parameters: float) -> SelectionInput:
    return SelectionInput(
        torch.tensor(values), torch.tensor(advantages), parameters, lambda n: torch.arange(n - 1, -1, -1)
    )


def test_kl_cov_selects_the_largest_covariances() -> None:
    # Means -2 and 0.25: the covariances are 2.75 - 2 * ..., computed here token by token.
    log_probs, advantages = [-1.0, -3.0, -2.5, -1.5], [2.0, -1.0, 1.0, -1.0]
    covariances = [(n + 2) * (a - 0.25) for n, a in zip(log_probs, advantages, strict=True)]
    assert covariances == [1.75, 1.25, -0.375, -0.625]
    half = select_kl_cov(selection(log_probs, advantages, kl_cov_ratio=0.5))
    assert half.tolist() == [True, True, False, False]
    # A share of 0.0002 of 4 tokens rounds to 0. At least one token is selected.
    assert select_kl_cov(selection(log_probs, advantages, kl_cov_ratio=0.0002)).tolist() == [True, False, False, False]


def test_clip_cov_selects_at_random_between_two_covariances() -> None:
    log_probs, advantages = [-1.0, -3.0, -2.5, -1.5], [2.0, -1.0, 1.0, -1.0]
    bounds = {"clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    # The candidates are tokens 0 and 1. The order given is the reverse one.
    one = select_clip_cov(selection(log_probs, advantages, clip_cov_ratio=0.25, **bounds))
    assert one.tolist() == [False, True, False, False]
    both = select_clip_cov(selection(log_probs, advantages, clip_cov_ratio=1.0, **bounds))
    assert both.tolist() == [True, True, False, False]
    few = select_clip_cov(selection(log_probs, advantages, clip_cov_ratio=0.0002, **bounds))
    assert few.tolist() == one.tolist(), "at least one token is selected"
    none = select_clip_cov(selection(log_probs, advantages, clip_cov_ratio=1.0, clip_cov_lb=2.0, clip_cov_ub=5.0))
    assert not none.any()
    # The covariances are 1.75 and 1.25. The bounds are not in the range.
    for low, high, expected in ((1.25, 5.0, [True, False]), (1.0, 1.75, [False, True]), (1.25, 1.75, [False, False])):
        chosen = select_clip_cov(
            selection(log_probs, advantages, clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high)
        )
        assert chosen.tolist() == [*expected, False, False]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("sapo", {"tau": 1.0}, "policy loss sapo has no such parameter; its parameters are tau_positive, tau_negative"),
        ("gspo", {"tau": 1.0}, "policy loss gspo has no such parameter; it has none"),
        ("sapo", {"tau_negative": 0.0}, "policy_loss_parameters.tau_negative 0: expected more than 0"),
        ("kl_cov", {"kl_cov_ratio": 1.5}, "kl_cov_ratio 1.5: expected more than 0 and at most 1"),
        ("clip_cov", {"clip_cov_lb": math.nan}, "clip_cov_lb nan: expected a finite number"),
    ],
)
def test_parameters_that_a_loss_does_not_have_are_refused(
    name: str, parameters: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BUILT_IN_POLICY_LOSSES[name].resolve(parameters)
