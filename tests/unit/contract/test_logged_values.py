"""Limits and means of what reward sources log."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.contract.logged_values import MAX_NAMES, cleaned, means_of, merged, problem_of


def test_names_and_values_are_cleaned() -> None:
    values = {"a b/c": 1, 3: 1, "": 1, "text": "x" * 2000, "half": "\ud800", "list": [1], "long": [1] * 1000}
    values |= {"nan": float("nan"), "huge": 10**400, "none": None, "yes": True, "n" * 100: 0.5}
    assert cleaned(values) == {
        "a_b_c": 1,
        "text": "x" * 1000,
        "half": "?",
        "list": "[1]",
        "yes": True,
        "n" * 64: 0.5,
    }
    assert problem_of(cleaned(values)) is None


def test_a_response_has_a_limited_number_of_names() -> None:
    assert list(cleaned({f"n{index}": 1 for index in range(100)})) == [f"n{index}" for index in range(MAX_NAMES)]


@pytest.mark.parametrize(
    "values",
    [{"a b": 1}, {"": 1}, {"a": float("inf")}, {"a": None}, {"a": [1]}, {"a": "x" * 1001}, {"a": {}}],
)
def test_values_of_another_process_are_checked(values: dict[str, Any]) -> None:
    assert problem_of(values) is not None
    assert problem_of({f"n{index}": 1 for index in range(MAX_NAMES + 1)}) == "65 values, expected at most 64"


def test_equal_names_of_several_sources_have_the_mean() -> None:
    assert merged([{"x": 1, "t": "a"}, {"x": True, "t": "b"}, {"y": 2}]) == {"x": 1.0, "t": "a", "y": 2}


def test_metrics_are_means_of_numbers_in_alphabetical_order_within_the_limit() -> None:
    assert means_of([{"b": 1, "t": "x"}, {"b": 2, "a_seconds": True}]) == {"logged_a_seconds": 1.0, "logged_b": 1.5}
    many = means_of([{f"n{index:03}": 1} for index in reversed(range(100))])
    assert list(many) == [f"logged_n{index:03}" for index in range(MAX_NAMES)]
