"""`every_case` runs a family of cases as one test and reports each failure."""

from __future__ import annotations

import inspect

import pytest

from tests.every_case import every_case


def test_every_case_runs_and_each_failure_is_reported_with_its_values() -> None:
    cases: list[tuple[int, str, int]] = []

    @every_case("number, text", [(1, "a"), pytest.param(2, "b", id="second"), (3, "c")])
    @every_case("factor", [10, 100])
    def family(number: int, text: str, factor: int, fixture: int) -> None:
        cases.append((number, text, factor))
        assert number == 2
        if factor == 100:
            pytest.fail("a failure that is no Exception")

    assert list(inspect.signature(family).parameters) == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases failed") as failed:
        family(fixture=0)
    assert len(cases) == 6
    assert "case: {'number': 1, 'text': 'a'}" in failed.value.exceptions[0].__notes__
    assert len(failed.value.exceptions[1].exceptions) == 1  # type: ignore[attr-defined]


def test_a_family_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one case"):
        every_case("number", [])
