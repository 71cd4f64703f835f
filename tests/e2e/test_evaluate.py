"""Evaluation during a run, and ``quartet evaluate`` of a saved policy or checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.demo.toy_task import ToyTask
from tests.e2e.commands import settings
from tests.e2e.conftest import Call, Run, train

NUM_PROMPTS = 6
STEPS = 3


@pytest.fixture(scope="module")
def evaluated_run(
    config: Path, toy_task: ToyTask, few_processes: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run that evaluates before the first step, after the second and after the last."""
    options = settings(
        f"data.validation={toy_task.prompts}",
        "evaluation.every_steps=2",
        f"evaluation.max_prompts={NUM_PROMPTS}",
        f"run.steps={STEPS}",
    )
    return train(tmp_path_factory.mktemp("evaluated"), config, *few_processes, *options)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_evaluates_before_the_first_step_every_second_step_and_after_the_last(evaluated_run: Run) -> None:
    assert (evaluated_run.result.code, evaluated_run.result.leftovers) == (0, [])
    evaluations = lines(evaluated_run.directory / "evaluations.jsonl")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 2, STEPS]
    assert (evaluations[0]["eval_win_rate_greedy"], evaluations[0]["eval_win_rate_sampled"]) == (0.5, 0.5)
    assert abs(evaluations[0]["eval_kl"]) < 1e-4
    assert len({evaluation["eval_kl"] for evaluation in evaluations}) == 3, "the policy has not changed"
    for step in (0, 2, STEPS):
        assert len(lines(evaluated_run.directory / f"evaluations/step-{step:06d}.jsonl")) == NUM_PROMPTS


def test_quartet_evaluate_reproduces_the_metrics_of_the_last_evaluation(
    evaluated_run: Run, call: Call, tmp_path: Path
) -> None:
    last = lines(evaluated_run.directory / "evaluations.jsonl")[-1]
    result = call("evaluate", evaluated_run.directory / "policy", "--json", "--output", tmp_path / "rows.jsonl")
    assert (result.code, result.leftovers) == (0, [])
    assert "prompts are over data.max_prompt_tokens 24 and dropped" in result.err
    # The command uses all threads and each service used one, so rounding may differ.
    assert {"step": STEPS, "policy_version": STEPS, **json.loads(result.out)} == pytest.approx(last, abs=1e-4)
    rows, expected = (
        lines(tmp_path / "rows.jsonl"),
        lines(evaluated_run.directory / f"evaluations/step-{STEPS:06d}.jsonl"),
    )
    assert [item["sampled"] for item in rows] == [item["sampled"] for item in expected]


def test_quartet_evaluate_shows_tables_for_the_policy_of_a_checkpoint(evaluated_run: Run, call: Call) -> None:
    # Of a checkpoint, the command evaluates the actor.
    checkpoint = evaluated_run.directory / "checkpoints" / f"step-{STEPS:06d}"
    result = call("evaluate", checkpoint)
    assert (result.code, result.err) == (0, "")
    assert "are over data.max_prompt_tokens" in result.out
    for shown in (f"{NUM_PROMPTS} validation prompts", "eval_win_rate_sampled", "initial policy", "sampled responses"):
        assert shown in result.out


def test_quartet_evaluate_refuses_a_missing_directory(call: Call, tmp_path: Path) -> None:
    result = call("evaluate", tmp_path / "absent")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: evaluate {tmp_path}/absent: no such directory")
