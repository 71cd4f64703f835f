"""Mean and confidence interval by Student's t."""

from __future__ import annotations

import math

import pytest

from quartet.launcher.sweep.results import mean_interval, t_quantile


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [
        (1, 12.706204736432095),
        (2, 4.302652729911275),
        (3, 3.182446305284263),
        (4, 2.7764451051977987),
        (7, 2.3646242510102993),
        (8, 2.306004135033371),
        (29, 2.045229642132703),
        (120, 1.9799304050824413),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees_of_freedom: int, expected: float) -> None:
    assert t_quantile(0.975, degrees_of_freedom) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.9995])
def test_quantiles_of_one_and_two_degrees_of_freedom_follow_their_closed_forms(probability: float) -> None:
    centred = 2 * probability - 1
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * centred / 2), rel=1e-9)
    assert t_quantile(probability, 2) == pytest.approx(centred * math.sqrt(2 / (1 - centred**2)), rel=1e-9)


def test_many_degrees_of_freedom_approach_the_normal_distribution() -> None:
    assert t_quantile(0.975, 20_000) == pytest.approx(1.959963984540054, rel=1e-4)


def test_an_interval_by_hand() -> None:
    # Mean 2, standard deviation 1, standard error 1 / sqrt(3), quantile 4.302653.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.484137711), abs=1e-8)
    assert mean_interval([1.0, 2.0, 3.0], confidence=0.9)[1] == pytest.approx(2.919985580 / math.sqrt(3), abs=1e-8)


def test_equal_values_have_an_interval_without_width() -> None:
    assert mean_interval([0.25] * 5) == (0.25, 0.0)


def test_too_few_values_have_no_interval() -> None:
    mean, half_width = mean_interval([3.5])
    assert mean == 3.5
    assert math.isnan(half_width)
    assert all(map(math.isnan, mean_interval([])))


def test_a_value_that_is_not_finite_has_no_interval() -> None:
    mean, half_width = mean_interval([1.0, math.nan])
    assert math.isnan(mean)
    assert math.isnan(half_width)


@pytest.mark.parametrize(("probability", "degrees_of_freedom"), [(1.0, 3), (0.4, 3), (0.975, 0)])
def test_impossible_quantiles_are_refused(probability: float, degrees_of_freedom: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        t_quantile(probability, degrees_of_freedom)
