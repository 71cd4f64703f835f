"""Runs of a distillation without a reward service, and the example as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from quartet.demo.corpus import favourable_clauses
from quartet.demo.toy_task import ToyTask
from tests.e2e.commands import QUARTET, Command, committed_steps, settings
from tests.e2e.conftest import Run, Start, step_metrics, train, weights
from tests.training.teachers import make_teacher

EXAMPLE = Path(__file__).parents[2] / "examples" / "distillation"


@pytest.fixture(scope="module")
def distilling(toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run with a teacher and without a reward."""
    teacher = make_teacher(toy_task.policy, tmp_path_factory.mktemp("teacher"))
    return settings(
        "reward.source=none",
        "reward.model=null",
        f"reference.model={teacher}",
        "algorithm.estimator=reinforce",
        "algorithm.kl_coefficient=0",
        "algorithm.distillation={}",
        "run.steps=6",
        "checkpoint.every_steps=3",
        "gateway.enabled=false",
    )


@pytest.fixture(scope="module")
def distilled(config: Path, distilling: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("distilled"), config, *distilling)
    assert run.result.code == 0, run.result
    return run


def test_a_run_without_a_reward_starts_no_reward_process(distilled: Run) -> None:
    logs = {path.name for path in (distilled.directory / "logs").glob("*.log")}
    assert {"actor.log", "reference.log"} <= logs
    assert not {"reward.log", "critic.log"} & logs
    lines = [line for line in distilled.result.out.splitlines() if line.startswith("step ")]
    assert len(lines) == 6
    assert not [line for line in lines if "reward" in line]
    assert all("teacher_kl" in step and "reward_mean" not in step for step in distilled.metrics)


@pytest.mark.slow  # tests/training/test_distillation.py loses services in one process.
def test_a_distillation_with_all_processes_killed_resumes_bit_identically(
    start: Start, config: Path, distilling: list[str], distilled: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *distilling)
    command.wait_for(lambda: committed_steps(run) >= 4)
    command.kill_everything()
    result = start("train", config, *distilling, "--resume").wait()
    assert (result.code, result.leftovers) == (0, []), result
    assert step_metrics(Run(result, run)) == step_metrics(distilled)
    assert weights(run) == weights(distilled.directory)


@pytest.mark.slow  # test_a_run_without_a_reward_starts_no_reward_process takes the same steps with a smaller teacher.
def test_the_student_of_the_example_approaches_its_teacher(tmp_path: Path) -> None:
    prepare = [sys.executable, EXAMPLE / "prepare.py", "runs/distillation", "--steps", "150"]
    subprocess.run(prepare, cwd=tmp_path, check=True, capture_output=True)
    few = settings("run.steps=15", "gateway.enabled=false")
    command = Command(QUARTET, "train", EXAMPLE / "distillation.yaml", *few, cwd=tmp_path)
    try:
        result = command.wait(300)
    finally:
        command.clean_up()
    assert result.code == 0, result
    run = tmp_path / "runs/distillation"
    kl = [json.loads(line)["teacher_kl"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert fmean(kl[-3:]) < 0.5 * kl[0]

    def favourable(step: int) -> float:
        lines = (run / f"trajectories/step-{step:06d}.jsonl").read_text().splitlines()
        return fmean(favourable_clauses(json.loads(line)["response"]) for line in lines)

    assert favourable(15) > favourable(1) + 0.5, "the teacher writes more favourable clauses"
