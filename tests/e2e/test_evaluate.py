"""Evaluation of a run, and `quartet evaluate` on what the run has saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.demo.toy_task import ToyTask
from tests.e2e.commands import QUARTET, Command, settings
from tests.e2e.conftest import STEPS, Run, Start

EVALUATED = 6


@pytest.fixture(scope="module")
def evaluated_run(config: Path, toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that evaluates after its second step, and before the first and after the last as always."""
    folder = tmp_path_factory.mktemp("evaluated")
    options = settings(
        f"data.validation={toy_task.prompts}", "evaluation.every_steps=2", f"evaluation.max_prompts={EVALUATED}"
    )
    command = Command(QUARTET, "train", config, *options, cwd=folder)
    try:
        return Run(command.ended(), folder / "runs" / "tiny")
    finally:
        command.clean_up()


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_evaluates_before_the_first_step_every_so_often_and_after_the_last(evaluated_run: Run) -> None:
    assert (evaluated_run.ended.code, evaluated_run.ended.left) == (0, [])
    result = lines(evaluated_run.directory / "evaluations.jsonl")
    assert [evaluation["step"] for evaluation in result] == [0, 2, STEPS]
    assert (result[0]["eval_win_rate_greedy"], result[0]["eval_win_rate_sampled"]) == (0.5, 0.5)
    assert abs(result[0]["eval_kl"]) < 1e-4
    assert len({evaluation["eval_kl"] for evaluation in result}) == 3, "the policy has moved"
    for step in (0, 2, STEPS):
        assert len(lines(evaluated_run.directory / f"evaluations/step-{step:06d}.jsonl")) == EVALUATED


def test_quartet_evaluate_gives_the_figures_of_the_runs_own_last_evaluation(
    evaluated_run: Run, start: Start, tmp_path: Path
) -> None:
    last = lines(evaluated_run.directory / "evaluations.jsonl")[-1]
    ended = start("evaluate", evaluated_run.directory / "policy", "--json", "--output", tmp_path / "rows.jsonl").ended()
    assert (ended.code, ended.left) == (0, [])
    assert ended.err.endswith("prompts are over data.max_prompt_tokens 24 and dropped\n")
    # The command has the machine's threads, each service had one: sums may round otherwise.
    assert {"step": STEPS, **json.loads(ended.out)} == pytest.approx(last, abs=1e-4)
    rows, expected = (
        lines(tmp_path / "rows.jsonl"),
        lines(evaluated_run.directory / f"evaluations/step-{STEPS:06d}.jsonl"),
    )
    assert [item["sampled"] for item in rows] == [item["sampled"] for item in expected]


def test_quartet_evaluate_shows_tables_of_a_checkpoints_policy(evaluated_run: Run, start: Start) -> None:
    # The actor in it is meant; so is the policy of a run's directory.
    checkpoint = evaluated_run.directory / "checkpoints" / f"step-{STEPS:06d}"
    ended = start("evaluate", checkpoint).ended()
    assert (ended.code, ended.err) == (0, "")
    assert "are over data.max_prompt_tokens" in ended.out
    for shown in (f"{EVALUATED} validation prompts", "eval_win_rate_sampled", "initial policy", "sampled responses"):
        assert shown in ended.out


def test_quartet_evaluate_refuses_what_is_not_there(start: Start, tmp_path: Path) -> None:
    ended = start("evaluate", tmp_path / "absent").ended()
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(f"error: evaluate {tmp_path}/absent: no such directory")
