"""Mean and confidence interval of few values, such as the last reward of the seeds of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

CONFIDENCE = 0.95
"""Probability that the interval of a normally distributed value contains its mean."""


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the mean and half the width of its confidence interval by Student's t, both in the unit of the values.

    The half width is NaN for fewer than two values, because one value shows no spread. The mean of no values is NaN.
    """
    if not values:
        return math.nan, math.nan
    if len(values) < 2:
        return values[0], math.nan
    mean = fmean(values)
    if not math.isfinite(mean):
        return mean, math.nan
    quantile = t_quantile((1 + confidence) / 2, len(values) - 1)
    return mean, quantile * stdev(values) / math.sqrt(len(values))


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability of at least 0.5 and less than 1.

    Bisects the finite sums for the central probability (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4) in the angle atan(t / sqrt(degrees of freedom)). Raises ValueError if an argument is out of range.
    """
    if not 0.5 <= probability < 1:
        raise ValueError(f"probability {probability}: expected at least 0.5 and less than 1")
    if degrees_of_freedom < 1:
        raise ValueError(f"degrees of freedom {degrees_of_freedom}: expected at least 1")
    central = 2 * probability - 1
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _central_probability(middle, degrees_of_freedom) < central:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees_of_freedom) * math.tan(high)


def _central_probability(angle: float, degrees_of_freedom: int) -> float:
    """Return the probability of a value between -t and t, for t = sqrt(degrees of freedom) * tan(angle)."""
    sine, squared_cosine = math.sin(angle), math.cos(angle) ** 2
    odd = degrees_of_freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if degrees_of_freedom == 1 else term
    for factor in range(3 if odd else 2, degrees_of_freedom - 1, 2):
        term *= squared_cosine * (factor - 1) / factor
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
