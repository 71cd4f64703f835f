"""KL divergence from the reference policy: estimators per token, and controllers of the penalty's coefficient."""

from __future__ import annotations

import math
from typing import Literal, Protocol, assert_never

import torch
from torch import Tensor

from quartet.errors import ComputationFailed, ConfigError, InvalidRequest
from quartet.ppo.ragged import check_flat

KLKind = Literal["k1", "absolute", "k2", "k3"]
KLControllerKind = Literal["fixed", "adaptive", "simple"]

# exp(20) is far above every useful ratio and far below the largest number in fp32.
LOG_RATIO_LIMIT = 20.0
_ERROR_LIMIT = 0.2


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, kind: KLKind) -> Tensor:
    """Return an estimate of KL(policy || reference) in nats at each token that the policy sampled: [tokens], [tokens] ->
    [tokens].

    With d = log_probs - reference_log_probs: k1 = d, absolute = |d|, k2 = d^2/2, k3 = exp(-d) - 1 + d with d clamped to +-20.
    Source: Schulman 2020, "Approximating KL divergence"; numerics item 8. Use k1 or absolute in a reward, k2 or k3 in a loss.
    Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, reference_log_probs=reference_log_probs)
    difference = log_probs - reference_log_probs
    match kind:
        case "k1":
            return difference
        case "absolute":
            return difference.abs()
        case "k2":
            return difference.square() / 2
        case "k3":
            # Both terms are clamped. With only exp clamped, the gradient of the other term below -20 would widen the gap.
            clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return torch.expm1(-clamped) + clamped
        case _:
            assert_never(kind)


class KLController(Protocol):
    """Controller of the KL coefficient. Its state is part of every checkpoint."""

    @property
    def value(self) -> float:
        """Current coefficient."""

    def update(self, kl: float, responses: int) -> None:
        """Update the coefficient with the step's ``kl`` per response, in nats: the mean over ``responses`` responses."""

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values that restore it exactly."""

    def load(self, state: dict[str, float]) -> None:
        """Restore ``state``. Raises InvalidRequest if it is malformed."""


class FixedKLController:
    """Constant KL coefficient."""

    def __init__(self, coefficient: float) -> None:
        _require(math.isfinite(coefficient) and coefficient >= 0, f"kl coefficient {coefficient}: expected 0 or more")
        self.value = coefficient

    def update(self, kl: float, responses: int) -> None:
        """Check the arguments, as the other controllers do. Raises ComputationFailed if ``kl`` is not finite."""
        _check_observation(kl, responses)

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load(self, state: dict[str, float]) -> None:
        """Restore ``state``. Raises InvalidRequest if it is malformed."""
        value = state.get("value")
        if value is None or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"KL controller state {state}: expected a 'value' of 0 or more")
        self.value = value


class AdaptiveKLController(FixedKLController):
    """Proportional controller that moves the KL per response towards ``target`` nats, by at most 20 % per ``horizon`` responses.

    beta <- beta (1 + clip(KL/target - 1, -0.2, 0.2) responses/horizon). Source: Ziegler et al. 2019, section 2.2;
    numerics item 9.
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        super().__init__(coefficient)
        _require_steerable(coefficient, target, horizon)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, responses: int) -> None:
        """Update the coefficient. Raises ConfigError if the horizon is so short that a low KL could make the coefficient
        negative.
        """
        _check_observation(kl, responses)
        if _ERROR_LIMIT * responses >= self.horizon:
            raise ConfigError(
                f"kl horizon {self.horizon:g}: expected more than {_ERROR_LIMIT * responses:g} "
                f"for {responses} responses per update"
            )
        error = min(max(kl / self.target - 1, -_ERROR_LIMIT), _ERROR_LIMIT)
        self.value *= 1 + error * responses / self.horizon


class SimpleKLController(FixedKLController):
    """Proportional controller without a clip. ``horizon`` counts updates: beta <- beta (1 + (KL - target)/target/horizon).

    Source: numerics item 9. A KL is never negative, so a negative estimate counts as 0. This keeps beta positive.
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        super().__init__(coefficient)
        _require_steerable(coefficient, target, horizon)
        _require(horizon > 1, f"kl horizon {horizon:g}: the simple form counts updates and needs more than 1")
        self.target, self.horizon = target, horizon

    def update(self, kl: float, responses: int) -> None:
        _check_observation(kl, responses)
        self.value *= 1 + (max(kl, 0.0) - self.target) / self.target / self.horizon


def make_kl_controller(kind: KLControllerKind, coefficient: float, target: float, horizon: float) -> KLController:
    """Return the controller of this kind. "fixed" ignores ``target`` (nats per response) and ``horizon``.

    Raises ConfigError.
    """
    match kind:
        case "fixed":
            return FixedKLController(coefficient)
        case "adaptive":
            return AdaptiveKLController(coefficient, target, horizon)
        case "simple":
            return SimpleKLController(coefficient, target, horizon)
        case _:
            assert_never(kind)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_steerable(coefficient: float, target: float, horizon: float) -> None:
    _require(
        coefficient > 0, f"kl coefficient {coefficient}: a controller that multiplies it never leaves 0; use 'fixed'"
    )
    _require(math.isfinite(target) and target > 0, f"kl target {target}: expected more than 0 nats per response")
    _require(math.isfinite(horizon) and horizon > 0, f"kl horizon {horizon}: expected more than 0")


def _check_observation(kl: float, responses: int) -> None:
    if not math.isfinite(kl):
        raise ComputationFailed(f"the mean KL of {responses} responses is {kl}: expected a finite number")
    if responses < 1:
        raise InvalidRequest(f"KL of {responses} responses: expected at least 1")
