"""The commands of the stages as real processes: killed and resumed, and their errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.run_directory.run_files import RunFiles
from tests.e2e.commands import QUARTET, Command, CommandResult

STEPS = 300


def command(folder: Path, *arguments: str) -> Command:
    return Command(QUARTET, *arguments, cwd=folder, environment={"OMP_NUM_THREADS": "1"})


def finished(running: Command) -> CommandResult:
    try:
        return running.wait(300)
    finally:
        running.clean_up()


def written_config(toy: Path, folder: Path) -> None:
    tree = {
        "stage": "sft",
        "run": {"name": "whole", "steps": STEPS},
        "data": {"train": str(toy / "data/pairs.jsonl"), "validation_fraction": 0},
        "model": {"path": str(toy / "base"), "lora": {"rank": 2, "dropout": 0.1}},
        "training": {"batch_size": 8, "micro_batch_size": 8, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 10},
    }
    (folder / "sft.yaml").write_text(json.dumps(tree))


@pytest.mark.slow
def test_a_stage_that_was_killed_is_resumed_with_the_same_bits(toy: Path, tmp_path: Path) -> None:
    written_config(toy, tmp_path)
    whole = finished(command(tmp_path, "sft", "sft.yaml"))
    assert whole.code == 0, whole
    cut = RunFiles(tmp_path / "runs/cut")
    killed = command(tmp_path, "sft", "sft.yaml", "--set", "run.name=cut")
    try:
        killed.wait_for(lambda: (cut.stage / "step-000020").exists() or (cut.stage / "step-000030").exists())
        killed.kill_everything()
    finally:
        killed.clean_up()
    assert 20 <= cut.last_step() < STEPS
    assert not cut.policy.exists()
    # The lock of the killed process is gone, and a stage is not started again by mistake.
    again = finished(command(tmp_path, "sft", "sft.yaml", "--set", "run.name=cut"))
    assert again.code == 2
    assert "holds an earlier run; use --resume to continue it" in again.err
    resumed = finished(command(tmp_path, "sft", "sft.yaml", "--set", "run.name=cut", "--resume"))
    assert resumed.code == 0, resumed
    assert "continued after step" in resumed.out
    assert resumed.leftovers == []
    weights = [(tmp_path / f"runs/{name}/policy/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_errors_have_status_2_and_one_line(toy: Path, tmp_path: Path) -> None:
    written_config(toy, tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    for arguments, message in (
        (["train", "sft.yaml"], "config sft.yaml: is of quartet sft, not of quartet train; run quartet sft sft.yaml"),
        (["sft", "sft.yaml", "--set", "data.train=bad.jsonl"], "bad.jsonl:1: has no answer; expected"),
        (["sft", "sft.yaml", "--resume"], "--resume: runs/whole has no run; start one without --resume"),
        (
            ["config", "check", "sft.yaml", "--set", "data.max_tokens=3"],
            "data.train: 139 of 139 rows are longer than 3",
        ),
    ):
        result = finished(command(tmp_path, *arguments))
        assert result.code == 2, result
        assert result.err.startswith("error: ")
        assert message in result.err
        assert result.err.count("\n") == 1
        assert not (tmp_path / "runs").exists()
    checked = finished(command(tmp_path, "config", "check", "sft.yaml"))
    assert (checked.code, checked.err) == (0, "")
    assert checked.out.endswith("sft.yaml: valid\n")
