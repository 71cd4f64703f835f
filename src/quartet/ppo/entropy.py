"""Controller of the entropy coefficient in the policy loss."""

from __future__ import annotations

import math

from quartet.errors import ComputationFailed, InvalidRequest


class AdaptiveEntropyController:
    """Controller that keeps the entropy of the policy at or above a target, in nats per token.

    After each step the coefficient c rises by ``step_size`` if the step's entropy is at most the target, else it falls by
    ``step_size``. It stays within its bounds. The next step's loss has the coefficient c if that entropy was at most the target,
    else 0. Before the first step the entropy counts as infinite. Sources: He et al. 2025 (Skywork-OR1); TRL 1.16,
    GRPOTrainer, use_adaptive_entropy; numerics item 25.
    """

    def __init__(
        self, coefficient: float, target: float, step_size: float, min_coefficient: float, max_coefficient: float
    ) -> None:
        """``coefficient``: the value of c before the first step. The numbers are those of a checked config."""
        self._current, self._entropy = coefficient, math.inf
        self._target, self._step_size = target, step_size
        self._bounds = (min_coefficient, max_coefficient)

    @property
    def value(self) -> float:
        """Coefficient of the next step's loss."""
        return self._current if self._entropy <= self._target else 0.0

    def update(self, entropy: float) -> None:
        """Update the coefficient with the step's mean ``entropy`` per token, in nats. Raises ComputationFailed if it is not
        finite.
        """
        if not math.isfinite(entropy):
            raise ComputationFailed(f"the mean entropy of the step is {entropy}: expected a finite number")
        low, high = self._bounds
        change = self._step_size if entropy <= self._target else -self._step_size
        self._current, self._entropy = min(max(self._current + change, low), high), entropy

    def state(self) -> dict[str, float | None]:
        """Return the state for a checkpoint, as JSON values that restore it exactly."""
        return {"coefficient": self._current, "entropy": self._entropy if math.isfinite(self._entropy) else None}

    def load(self, state: dict[str, float | None]) -> None:
        """Restore ``state``. Raises InvalidRequest if it is malformed."""
        coefficient, entropy = state.get("coefficient"), state.get("entropy")
        if coefficient is None or not math.isfinite(coefficient) or coefficient < 0:
            raise InvalidRequest(f"entropy controller state {state}: expected a 'coefficient' of 0 or more")
        if entropy is not None and not math.isfinite(entropy):
            raise InvalidRequest(f"entropy controller state {state}: expected a finite 'entropy', or null")
        self._current, self._entropy = coefficient, math.inf if entropy is None else entropy
