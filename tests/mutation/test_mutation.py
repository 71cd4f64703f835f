"""Mutation testing without Cosmic Ray: replaced modules, the choice of tests, explanations, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import Command
from tests.mutation import __main__ as command
from tests.mutation import execute
from tests.mutation.report import Mutant, Result, page, problems, read_explanations

MUTANT = Mutant("kl", "NumberReplacer", "kl_estimate", "return x / 2", "return x / 3", "source")


def test_a_survivor_without_an_explanation_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.toml"
    file.write_text('[[equivalent]]\nmodule = "kl"\nbefore = "return x / 2"\nreason = "unused"\n', encoding="utf-8")
    explained, survived, killed = read_explanations(file), Result(MUTANT, "survived"), Result(MUTANT, "killed")
    assert problems([survived], explained) == []
    assert len(problems([survived], [])) == 1
    assert "no survivor" in problems([killed], explained)[0]


def test_an_explanation_may_name_the_changed_lines(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.toml"
    entry = '[[equivalent]]\nmodule = "kl"\nbefore = "return x / 2"\nafter = ["return x / 1"]\nreason = "unused"\n'
    file.write_text(entry, encoding="utf-8")
    assert len(problems([Result(MUTANT, "survived")], read_explanations(file))) == 2


def test_the_page_counts_outcomes_and_lists_survivors() -> None:
    text = page([Result(MUTANT, "survived"), Result(MUTANT, "killed"), Result(MUTANT, "killed")], [])
    assert "| kl | 3 | 2 | 1 |" in text
    assert "| all | 3 | 2 | 1 |" in text
    assert "| kl | kl_estimate | `return x / 2` | `return x / 3` | **none** |" in text


def test_tests_of_a_module_come_before_those_of_its_users() -> None:
    tests = execute.tests_of("kl")
    assert tests[0] == "tests/unit/ppo/test_kl.py"
    assert "tests/unit/ppo/test_losses.py" in tests[1:]
    assert "tests/unit/ppo/test_statistics.py" not in tests


CHANGES = [
    ("def two(): return 2", "assert two() == 2", 30, "survived "),
    ("def two(): return 3", "assert two() == 2", 30, "killed test_1.py"),
    ("def two():\n    while True: pass", "assert two() == 2", 1, "killed "),
    ("two = 1 / 0", "assert two", 30, "killed test_3.py"),
]
"""Module, test, seconds of the processor that it may take, and outcome."""


SCRIPT = """
import json, sys, time
# This is a fork of a process that has imported torch, and Quartet, which preload() must not import.
for name in [name for name in sys.modules if name.partition(".")[0] == "quartet"]:
    del sys.modules[name]
from tests.mutation import execute
execute.preload()
for code, file, seconds in json.loads(sys.argv[1]):
    child = execute.Child("kl", code, [file], seconds)
    while (outcome := child.outcome()) is None:
        time.sleep(0.02)
    print(outcome, child.failed.rpartition("/")[2])
"""
"""Prints the outcome of each change."""


@pytest.mark.slow
def test_a_child_imports_the_replaced_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    changes = []
    for number, (code, test, seconds, _) in enumerate(CHANGES):
        file = tmp_path / f"test_{number}.py"
        file.write_text(f"from quartet.ppo.kl import two\n\ndef test(): {test}\n", encoding="utf-8")
        changes.append((code, str(file), seconds))
    command = Command(
        sys.executable, script, json.dumps(changes), cwd=execute.ROOT, environment={"PYTHONPATH": str(execute.ROOT)}
    )
    try:
        result = command.wait()
    finally:
        command.clean_up()
    assert (result.code, result.out.split("\n")[:-1]) == (0, [outcome for *_, outcome in CHANGES]), result.err


def test_only_mutants_without_a_valid_result_are_tested_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("a", "first"), ("b", "second")):
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    mutants = [Mutant("kl", "NumberReplacer", "f", "1", "2", source) for source in ("killed by a", "slow", "survived")]
    tested: list[str] = []

    class Child:
        def __init__(self, _module: str, source: str, *_: object) -> None:
            self.source, self.failed = source, "test_a.py" if source == "killed by a" else ""
            tested.append(source)

        def outcome(self) -> str:
            return "survived" if self.source == "survived" else "killed"

    monkeypatch.setattr(execute, "Child", Child)
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    monkeypatch.setattr(execute, "tests_of", lambda _: ["test_a.py", "test_b.py"])
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(command, "_seconds", lambda *_: 1)

    def again() -> list[str]:
        tested.clear()
        assert len(list(command._results(["kl"], mutants, 1))) == 3
        return tested

    assert again() == ["killed by a", "slow", "survived"]
    assert again() == []
    (tmp_path / "test_b.py").write_text("changed", encoding="utf-8")
    assert again() == ["slow", "survived"]
    (tmp_path / "test_a.py").write_text("changed", encoding="utf-8")
    assert again() == ["killed by a", "slow", "survived"]
