"""The measurements of docs/verifiers.md: their calculations and tables."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import learning_curves, sandbox
from quartet.verifiers.programs import Kind, Report


def test_a_learning_curve_has_the_mean_of_each_part() -> None:
    curves = {("code", 0): ([0.0] * 10 + [1.0] * 5, 61.2), ("arithmetic", 1): ([0.25] * 10, 9.0)}
    lines = learning_curves.table(curves, "a machine").splitlines()
    assert lines[2] == "| example | seed | 1-10 | 11-15 | seconds |"
    assert lines[4:] == ["| code | 0 | 0.00 | 1.00 | 61 |", "| arithmetic | 1 | 0.25 |  | 9 |"]


def test_throughput_is_measured_for_each_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Box:
        name = "a sandbox"

    passed = Report((Kind.PASSED,))
    monkeypatch.setattr(sandbox, "run_with_input", lambda *_: passed)
    monkeypatch.setattr(sandbox, "run_with_calls", lambda *_: passed)
    monkeypatch.setattr(sandbox, "available_cores", lambda: 2)
    lines = sandbox.table(Box(), argparse.Namespace(programs=4, rounds=1), "a machine").splitlines()  # type: ignore[arg-type]
    assert [line.rpartition("| ")[0] for line in lines[4:]] == [
        f"| {test} | {workers} " for test in ("input and output", "statement") for workers in (1, 2, 4)
    ]


def test_a_program_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run_with_input", lambda *_: Report((Kind.TIME_LIMIT,)))
    with pytest.raises(RuntimeError, match="3 of 3 programs failed"):
        sandbox.rate(sandbox.with_input, None, 3, 2)  # type: ignore[arg-type]
