"""Comparison of a metric of Quartet with the same metric of TRL, within a relative tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

TOLERANCE = 1e-4

Number = float | NDArray[np.float32]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One row of the page: the number of each side, their relative difference, and the largest difference allowed.

    For an array, the numbers are root mean squares, and the difference covers every element.
    """

    name: str
    quartet: float
    trl: float
    difference: float
    tolerance: float = TOLERANCE

    @property
    def holds(self) -> bool:
        """Return whether the difference is within the tolerance; a difference of NaN is not."""
        return self.difference <= self.tolerance


def compare(name: str, quartet: Number, trl: Number) -> MetricComparison:
    """Compare numbers by |quartet - trl| / |trl|, and arrays by the largest difference over the largest magnitude.

    Raises ValueError if the arrays have different shapes.
    """
    ours, theirs = np.asarray(quartet, np.float64), np.asarray(trl, np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{name}: Quartet has shape {ours.shape}, TRL {theirs.shape}; they come from different rollouts"
        )
    difference = _relative(np.abs(ours - theirs).max(), np.abs(theirs).max())
    if ours.ndim == 0:
        return MetricComparison(name, float(ours), float(theirs), difference)
    return MetricComparison(name, *(math.sqrt(np.square(side).mean()) for side in (ours, theirs)), difference)


def compare_change(name: str, before: Weights, quartet: Weights, trl: Weights, tolerance: float) -> MetricComparison:
    """Compare the changes of the weights in an update: the Euclidean norm of their difference over that of TRL's change.

    Raises ValueError if the names of the parameters differ.
    """
    if not before.keys() == quartet.keys() == trl.keys():
        raise ValueError(f"{name}: the two sides' parameters have different names")
    change = _distance(trl, before)
    return MetricComparison(
        name, _distance(quartet, before), change, _relative(_distance(quartet, trl), change), tolerance
    )


def _distance(a: Weights, b: Weights) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else math.inf
