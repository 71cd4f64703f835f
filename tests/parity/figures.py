"""Two sides' figures against each other: the relative difference, the tolerance, and whether it holds."""

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
class Figure:
    """One row: what each side shows, the relative difference of all that lies behind it, and the most it may be."""

    name: str
    quartet: float
    trl: float
    difference: float
    tolerance: float = TOLERANCE

    @property
    def holds(self) -> bool:
        """Return whether the difference is within the tolerance. NaN is not."""
        return self.difference <= self.tolerance


def compare(name: str, quartet: Number, trl: Number) -> Figure:
    """Numbers by |quartet - trl| / |trl|; arrays by the largest difference over the largest magnitude, root mean squares shown.

    Raises ValueError for arrays of different shapes.
    """
    ours, theirs = np.asarray(quartet, np.float64), np.asarray(trl, np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: Quartet has shape {ours.shape}, TRL {theirs.shape}; these are not the same rollouts")
    difference = _relative(np.abs(ours - theirs).max(), np.abs(theirs).max())
    if ours.ndim == 0:
        return Figure(name, float(ours), float(theirs), difference)
    return Figure(name, *(math.sqrt(np.square(side).mean()) for side in (ours, theirs)), difference)


def compare_change(name: str, before: Weights, quartet: Weights, trl: Weights, tolerance: float) -> Figure:
    """Weights after an update: the Euclidean norms of both changes, and the norm of their difference over TRL's.

    Raises ValueError when the parameters' names differ.
    """
    if not before.keys() == quartet.keys() == trl.keys():
        raise ValueError(f"{name}: the two sides' parameters have different names")
    change = _distance(trl, before)
    return Figure(name, _distance(quartet, before), change, _relative(_distance(quartet, trl), change), tolerance)


def _distance(a: Weights, b: Weights) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else math.inf
