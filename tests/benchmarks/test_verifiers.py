"""The measurements of docs/verifiers.md: their calculations and tables."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import learning_curves, sandbox
from benchmarks.learning_curves import Curve
from benchmarks.page import begin, end
from quartet.config.loading import load_config
from quartet.verifiers.programs import Kind, Report


def test_a_learning_curve_has_the_mean_of_each_part() -> None:
    curves = {
        ("code", 0): Curve([0.0] * 10 + [1.0] * 5, 61.2, 40.0),
        ("arithmetic", 1): Curve([0.25] * 10, 9.0, 8.6),
    }
    lines = learning_curves.table(curves, "a machine").splitlines()
    assert lines[2] == "| example | seed | step 1 | 1-10 | 11-15 | CPU seconds | seconds |"
    assert lines[4:] == ["| code | 0 | 0.00 | 0.00 | 1.00 | 40 | 61 |", "| arithmetic | 1 | 0.25 | 0.25 |  | 9 | 9 |"]


def test_the_page_gets_the_table_and_a_plot_of_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning_curves, "prepare", lambda *_: None)
    monkeypatch.setattr(learning_curves, "curve", lambda *_: Curve([0.2, 0.6], 9.0, 8.0))
    learning_curves.PAGE.parent.mkdir(parents=True)
    learning_curves.PAGE.write_text(f"{begin('learning_curves')}\n{end('learning_curves')}")
    assert learning_curves.main(["--folder", "out"]) == 0
    text = learning_curves.PAGE.read_text()
    assert "| code | 2 | 0.20 | 0.40 |" in text
    assert "| guessing | 2 | 0.20 | 0.40 |" in text
    for picture in ("learning-verifiers.svg", "learning-environments.svg"):
        assert f"]({picture})" in text
        assert learning_curves.PAGE.with_name(picture).is_file()
    assert len(json.loads(Path("out/results.json").read_text())) == 15


def test_a_run_gets_its_seed_and_the_models_of_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str | Path], check: bool, env: dict[str, str]) -> None:
        commands.append([str(part) for part in command])
        folder = tmp_path / "runs/guessing-1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "score_mean": 0.5}\n')

    monkeypatch.setattr(learning_curves.subprocess, "run", run)
    learning_curves.prepare("guessing", tmp_path)
    assert learning_curves.curve("guessing", 1, tmp_path).scores == [0.5]
    assert commands[0][1:] == ["examples/multi_turn/prepare.py", str(tmp_path), "--games", "guessing"]
    config = commands[1][2]
    settings = [value for option, value in pairwise(commands[1]) if option == "--set"]
    loaded = load_config(Path(config), settings)
    assert (loaded.run.name, loaded.run.seed) == ("guessing-1", 1)
    assert loaded.actor.model == str(tmp_path / "guessing/policy")


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
