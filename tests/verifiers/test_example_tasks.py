"""The examples that make their own model and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from examples.arithmetic import prepare as arithmetic
from examples.code import prepare as code
from quartet.verifiers.code import run_tests_batched
from quartet.verifiers.sandbox.process import Sandbox


@pytest.mark.parametrize("example", [arithmetic, code])
def test_an_example_makes_a_model_and_prompts_and_replaces_only_them(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "SENTENCES", 500)
    out = tmp_path / "out"
    for _ in range(2):
        assert example.main([str(out), "--steps", "1"]) == 0
    assert (out / "policy/model.safetensors").is_file()
    lines = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert len({line["text"] for line in lines}) == len(lines)
    (out / "notes.txt").write_text("mine")
    assert example.main([str(out), "--steps", "1"]) == 2
    assert "contains 'notes.txt'" in capsys.readouterr().err


def test_the_text_of_each_example_has_its_share_of_right_answers() -> None:
    answers = dict(arithmetic.problems())
    sums = [text.partition("=") for text in arithmetic.sentences(0)]
    right = sum(answers[problem + "="] == int(answer) for problem, _, answer in sums) / len(sums)
    assert abs(right - arithmetic.RIGHT) < 0.02
    draw = random.Random(0)
    attempts = [(each, code.attempt(each, draw)) for each in code.exercises() * 10]
    right = sum(text == each.solution for each, text in attempts) / len(attempts)
    assert abs(right - code.RIGHT) < 0.02


def test_the_solutions_of_the_exercises_pass_and_other_programs_do_not(box: Sandbox) -> None:
    exercises = random.Random(1).sample(code.exercises(), 3)
    responses = [each.solution for each in exercises] + [" 0", " (x", ""]
    fields = [{"start": each.prompt, "tests": each.tests()} for each in exercises * 2]
    assert run_tests_batched([""] * 6, responses, fields, prefix_field="start") == [1.0] * 3 + [0.0] * 3
