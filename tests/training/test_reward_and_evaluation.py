"""Reward functions, ensembles and evaluations in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from quartet.demo.toy_task import ToyTask
from tests.training.conftest import MakeConfig
from tests.training.runs import active_run, json_lines, run_to_completion

FUNCTIONS = '''
import json

def by_field(prompt, response, fields):
    """Return twice the number in the fields of the prompt."""
    print("a line on standard output is not a score")
    return 2.0 * fields["worth"]

def words(prompts, responses, fields):
    return [len(response.split()) for response in responses]

def fails(prompt, response, fields):
    raise ValueError("no such thing")

def prefers_initial(prompt, response, initial_response, fields):
    return 0.25
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_task: ToyTask) -> Path:
    """The working directory of the run, with a module of functions and prompts with a field."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    lines = [json.loads(line) for line in toy_task.prompts.read_text().splitlines()]
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            file.write(json.dumps({**line, "worth": number}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_reward_function_reads_the_fields_of_the_prompt(make: MakeConfig, functions: Path) -> None:
    reward = {"source": "function", "function": "mine:by_field", "model": None}
    config = make(
        data={"prompts": str(functions / "prompts.jsonl")}, reward=reward, algorithm={"estimator": "reinforce"}
    )
    run = run_to_completion(config)
    for step in (1, 2):
        for item in run.trajectories(step):
            prompt = int(item["id"].split("/")[2])
            assert item["score"] == 2.0 * prompt


def test_an_ensemble_reports_its_weighted_sum_and_each_part(
    make: MakeConfig, functions: Path, toy_task: ToyTask
) -> None:
    parts = [
        {"name": "tone", "model": str(toy_task.reward), "weight": 0.5},
        {"name": "words", "source": "function", "function": "mine:words", "batched": True, "weight": -0.1},
    ]
    run = run_to_completion(make(reward={"source": "ensemble", "parts": parts, "model": None}))
    for number, step in enumerate(run.metrics, 1):
        items = run.trajectories(number)
        for item in items:
            assert item["parts"]["words"] == len(item["response"].split())
            expected = 0.5 * item["parts"]["tone"] - 0.1 * item["parts"]["words"]
            assert item["score"] == pytest.approx(expected, abs=1e-5)
        for name in ("tone", "words"):
            assert step[f"reward_{name}_mean"] == pytest.approx(fmean(item["parts"][name] for item in items), abs=1e-5)


def test_a_failing_reward_function_ends_the_run_with_its_name_and_error(make: MakeConfig, functions: Path) -> None:
    reward = {"source": "function", "function": "mine:fails", "model": None, "quote_texts": True}
    with active_run(make(reward=reward, critic={"model": None})) as running:
        run = running.finish()
    assert run.code == 1
    assert all(part in run.progress.error for part in ("mine:fails", "ValueError", "no such thing"))
    assert not run.files.metrics.exists(), "the failed step has metrics"


def test_evaluations_are_stored_and_compared_with_the_initial_policy(
    make: MakeConfig, functions: Path, toy_task: ToyTask
) -> None:
    config = make(
        run={"steps": 3},
        data={"validation": str(toy_task.prompts)},
        evaluation={"every_steps": 2, "max_prompts": 5, "judge": "mine:prefers_initial"},
        actor={"learning_rate": 0.05},
    )
    run = run_to_completion(config)
    summaries = json_lines(run.files.root / "evaluations.jsonl")
    assert [summary["step"] for summary in summaries] == [0, 2, 3]
    first, last = summaries[0], summaries[-1]
    assert first["eval_win_rate_greedy"] == first["eval_win_rate_sampled"] == 0.5, (
        "the initial policy does not tie with itself"
    )
    assert first["eval_kl"] == pytest.approx(0, abs=1e-4)
    for summary in summaries:
        rows = json_lines(run.files.root / "evaluations" / f"step-{summary['step']:06d}.jsonl")
        assert len(rows) == 5
        assert summary["eval_reward_greedy"] == pytest.approx(fmean(row["score_greedy"] for row in rows))
        assert summary["eval_win_rate_sampled"] == pytest.approx(fmean(row["win_sampled"] for row in rows))
    rows = json_lines(run.files.root / "evaluations" / "step-000003.jsonl")
    assert {row["judge"] for row in rows} <= {0.25, 0.5}
    assert last["eval_judge_win_rate"] == pytest.approx(fmean(row["judge"] for row in rows))
    assert any(row["greedy"] != row["initial_greedy"] for row in rows), "the policy has not changed"
    assert any(note.startswith("evaluation after step 3: ") for note in run.progress.notes)


def test_evaluation_sets_are_recorded_with_the_version_of_the_policy(
    make: MakeConfig, functions: Path, toy_task: ToyTask
) -> None:
    sets = [
        {
            "name": "easy",
            "path": str(toy_task.prompts),
            "samples_per_prompt": 3,
            "pass_at": [1, 2],
            "success_score": 0.0,
        },
        {"name": "hard", "path": str(functions / "prompts.jsonl"), "max_prompts": 2, "pass_at": [1]},
    ]
    config = make(run={"steps": 3}, evaluation={"every_steps": 2, "max_prompts": 4, "sets": sets})
    run = run_to_completion(config)
    summaries = json_lines(run.files.evaluation_summaries)
    assert [(item["step"], item["policy_version"]) for item in summaries] == [(0, 0), (2, 2), (3, 3)]
    for summary in summaries:
        for name, count, samples in (("easy", 4, 3), ("hard", 2, 1)):
            rows = json_lines(run.files.evaluation_of(summary["step"], name))
            assert [item["policy_version"] for item in rows] == [summary["step"]] * count
            assert {len(item["samples"]) for item in rows} == {samples}
            shares = [item["successes"] / samples for item in rows]
            assert summary[f"eval_{name}_pass_at_1"] == pytest.approx(fmean(shares))
    assert not any(name.startswith(("eval_reward", "eval_win")) for name in summaries[-1])
    assert any("easy pass at 2" in note for note in run.progress.notes)


def test_evaluation_does_not_change_training(make: MakeConfig, toy_task: ToyTask) -> None:
    sets = [{"name": "more", "path": str(toy_task.prompts), "samples_per_prompt": 2, "pass_at": [2]}]
    evaluated: dict[str, Any] = {
        "data": {"validation": str(toy_task.prompts)},
        "evaluation": {"every_steps": 1, "max_prompts": 3, "sets": sets},
    }
    with_evaluation, without_evaluation = run_to_completion(make(**evaluated)), run_to_completion(make())
    weights = [run.files.policy / "model.safetensors" for run in (with_evaluation, without_evaluation)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
