"""Learning rate schedule of a run."""

from __future__ import annotations

import math
from typing import Literal, assert_never

from quartet.errors import InvalidRequest

ScheduleKind = Literal["constant", "linear", "cosine"]


def scheduled_learning_rate(
    step: int, total_steps: int, peak: float, final: float, warmup_steps: int, kind: ScheduleKind
) -> float:
    """Return the learning rate of training step ``step`` = 1, 2, ... of a run of ``total_steps``.

    With w = ``warmup_steps``: peak * (step / w) up to step w, whose rate is exactly ``peak``. After it, with x = (step - w - 1) /
    (total_steps - w): constant, peak; linear, peak + (final - peak) x; cosine, final + (peak - final) (1 + cos(pi x)) / 2. The
    first step after the warm-up has the rate ``peak``. The step after the last one would have ``final``, so with a decay to 0
    every step still has a positive rate. Source: Loshchilov & Hutter 2017, equation 5 (cosine, without restarts). Raises
    InvalidRequest.
    """
    _check(step, total_steps, peak, final, warmup_steps)
    if step <= warmup_steps:
        # Divided first, so that the factor is exactly 1 at the end of the warm-up.
        return peak * (step / warmup_steps)
    if kind == "constant":
        return peak
    if step > total_steps:
        return final
    progress = (step - warmup_steps - 1) / (total_steps - warmup_steps)
    match kind:
        case "linear":
            return peak + (final - peak) * progress
        case "cosine":
            return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(kind)


def _check(step: int, total_steps: int, peak: float, final: float, warmup_steps: int) -> None:
    if step < 1 or total_steps < 1:
        raise InvalidRequest(f"step {step} of {total_steps}: expected both to be at least 1")
    if warmup_steps < 0:
        raise InvalidRequest(f"warm-up of {warmup_steps} steps: expected 0 (none) or more")
    if not all(math.isfinite(rate) and rate >= 0 for rate in (peak, final)):
        raise InvalidRequest(f"learning rates {peak} falling to {final}: expected finite numbers of 0 or more")
