"""KL estimators per token, and the controllers of the coefficient."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from quartet.errors import ComputationFailed, ConfigError, InvalidRequest
from quartet.ppo.kl import KLKind, kl_estimate, make_kl_controller
from tests.unit.ppo.batches import draw, gradient, seeds

DEFINITIONS = {
    "k1": lambda d: d,
    "absolute": lambda d: -d if d < 0 else d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("kind", list(DEFINITIONS))
@given(seed=seeds)
def test_each_estimator_follows_its_definition(kind: KLKind, seed: int) -> None:
    log_probs, reference = draw(seed, 20), draw(seed + 1, 20)
    expected = [DEFINITIONS[kind](a - b) for a, b in zip(log_probs.tolist(), reference.tolist(), strict=True)]
    assert kl_estimate(log_probs, reference, kind).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.4), ("absolute", 0.4), ("k2", 0.08), ("k3", 0.07032005)])
def test_a_worked_example_with_a_policy_more_certain_than_its_reference(kind: KLKind, expected: float) -> None:
    assert kl_estimate(torch.tensor([-1.2]), torch.tensor([-1.6]), kind).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "expected"), [("k1", -0.4), ("absolute", 0.4), ("k2", 0.08), ("k3", 0.0918247)])
def test_a_worked_example_with_a_policy_less_certain_than_its_reference(kind: KLKind, expected: float) -> None:
    assert kl_estimate(torch.tensor([-1.6]), torch.tensor([-1.2]), kind).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@given(seed=seeds)
def test_the_unbiased_estimators_average_to_the_divergence(kind: KLKind, seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.ones(6)), random.dirichlet(np.ones(6))
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    per_token = kl_estimate(torch.tensor(p).log(), torch.tensor(q).log(), kind)
    assert (torch.tensor(p) * per_token).sum().item() == pytest.approx(divergence, rel=1e-6)


def test_k3_is_never_negative_and_stays_finite() -> None:
    difference = torch.linspace(-1000, 1000, 4001)
    estimate = kl_estimate(difference, torch.zeros_like(difference), "k3")
    assert estimate.isfinite().all()
    assert (estimate >= 0).all()
    assert estimate[0].item() == pytest.approx(math.exp(20) - 1 - 20)
    assert estimate[-1].item() == pytest.approx(math.exp(-20) - 1 + 20)


def test_k3_has_no_gradient_beyond_its_clamp() -> None:
    grads = gradient(lambda x: kl_estimate(x, torch.zeros(4), "k3").sum(), torch.tensor([-30.0, -1.0, 1.0, 30.0]))
    assert grads == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-1), 0.0])


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        kl_estimate(torch.zeros(3), torch.zeros(1), "k1")


# Ziegler et al.: the relative error, clipped to +-0.2, times responses/horizon.
@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.6, 0.1 * (1 + 0.1 * 0.05)), (12.0, 0.1 * 1.01), (600.0, 0.1 * 1.01), (0.0, 0.1 * 0.99), (6.0, 0.1)],
    ids=["above", "far above", "absurd", "none", "on target"],
)
def test_the_adaptive_controller_takes_a_clipped_proportional_step(kl: float, expected: float) -> None:
    controller = make_kl_controller("adaptive", 0.1, target=6.0, horizon=1000.0)
    controller.update(kl, responses=50)
    assert controller.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"), [(12.0, 0.1 * 1.1), (66.0, 0.1 * 2.0), (0.0, 0.1 * 0.9), (6.0, 0.1), (-1.0, 0.1 * 0.9)]
)
def test_the_simple_controller_takes_an_unclipped_step_per_update(kl: float, expected: float) -> None:
    controller = make_kl_controller("simple", 0.1, target=6.0, horizon=10.0)
    controller.update(kl, responses=50)
    assert controller.value == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.floats(-10, 100), max_size=20))
def test_the_fixed_controller_is_constant(observed: list[float]) -> None:
    controller = make_kl_controller("fixed", 0.05, target=6.0, horizon=10.0)
    for kl in observed:
        controller.update(kl, responses=8)
    assert controller.value == 0.05


@pytest.mark.parametrize("kind", ["adaptive", "simple"])
@given(st.lists(st.floats(-10, 100), max_size=20))
def test_the_coefficient_stays_positive(kind: str, observed: list[float]) -> None:
    controller = make_kl_controller(kind, 0.05, target=6.0, horizon=20.0)  # type: ignore[arg-type]
    for kl in observed:
        controller.update(kl, responses=64)
        assert controller.value > 0


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "simple"])
def test_a_controller_continues_from_its_checkpoint_bit_identically(kind: str) -> None:
    controllers = [make_kl_controller(kind, 0.1, 6.0, 100.0) for _ in range(2)]  # type: ignore[arg-type]
    first, second = controllers
    first.update(7.1, responses=33)
    second.load(json.loads(json.dumps(first.state())))
    for controller in controllers:
        controller.update(3.3, responses=33)
    assert first.value == second.value
    assert first.state() == second.state()


@pytest.mark.parametrize("state", [{}, {"value": -0.1}, {"value": math.nan}, {"value": math.inf}])
def test_a_broken_checkpoint_is_refused(state: dict[str, float]) -> None:
    controller = make_kl_controller("adaptive", 0.1, 6.0, 100.0)
    with pytest.raises(InvalidRequest):
        controller.load(state)
    assert controller.value == 0.1


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "simple"])
@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_non_finite_kl_does_not_change_the_coefficient(kind: str, kl: float) -> None:
    controller = make_kl_controller(kind, 0.1, 6.0, 100.0)  # type: ignore[arg-type]
    with pytest.raises(ComputationFailed):
        controller.update(kl, responses=4)
    assert controller.value == 0.1


def test_a_horizon_too_short_for_the_batch_is_refused() -> None:
    # 0.2 * 50 / 10 = 1: one step of low KL would set the penalty to 0, and a larger batch would make it negative.
    with pytest.raises(ConfigError, match="horizon"):
        make_kl_controller("adaptive", 0.1, 6.0, 10.0).update(0.0, responses=50)


@pytest.mark.parametrize(
    ("kind", "coefficient", "target", "horizon"),
    [
        ("fixed", -0.1, 6.0, 10.0),
        ("fixed", math.nan, 6.0, 10.0),
        ("adaptive", 0.0, 6.0, 10.0),
        ("adaptive", 0.1, 0.0, 10.0),
        ("adaptive", 0.1, 6.0, 0.0),
        ("simple", 0.0, 6.0, 10.0),
        ("simple", 0.1, 6.0, 1.0),
    ],
)
def test_invalid_controller_settings_are_refused(kind: str, coefficient: float, target: float, horizon: float) -> None:
    with pytest.raises(ConfigError):
        make_kl_controller(kind, coefficient, target, horizon)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "coefficient", "target", "horizon"),
    [("fixed", 0.0, 6.0, 10.0), ("adaptive", 1e-3, 0.5, 0.5), ("simple", 1e-3, 0.5, 1.5)],
)
def test_controller_settings_just_inside_their_bounds_are_taken(
    kind: str, coefficient: float, target: float, horizon: float
) -> None:
    assert make_kl_controller(kind, coefficient, target, horizon).value == coefficient  # type: ignore[arg-type]


def test_a_checkpoint_may_hold_a_coefficient_of_zero() -> None:
    controller = make_kl_controller("fixed", 0.1, 6.0, 10.0)
    controller.load({"value": 0.0})
    assert controller.value == 0.0


def test_an_update_needs_the_kl_of_at_least_one_response() -> None:
    controller = make_kl_controller("adaptive", 0.1, 6.0, 10.0)
    with pytest.raises(InvalidRequest, match="at least 1"):
        controller.update(6.0, responses=0)
    controller.update(12.0, responses=1)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 / 10))
