"""The tag of the best checkpoint: the same for every process that reads the files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quartet.config.run import CheckpointConfig
from quartet.run_directory.checkpoints import FORMAT, MANIFEST, BestCheckpoint, roll_back, tag_best, tagged_checkpoints
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import checkpoint_at


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """A run of four steps with the rewards 1, 3, 3 and 2, and a checkpoint after each."""
    files = RunFiles(tmp_path)
    lines = [{"step": step, "reward_mean": reward} for step, reward in enumerate((1.0, 3.0, 3.0, 2.0), 1)]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2, 3, 4):
        add_checkpoint(files, step)
    return files


def add_checkpoint(files: RunFiles, step: int) -> None:
    folder = files.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    manifest = {
        "format": FORMAT,
        "run": "run",
        "step": step,
        "leader_epoch": 1,
        "state": {},
        "roles": [],
        "files": {},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def config(**settings: Any) -> CheckpointConfig:
    return CheckpointConfig(best_metric="reward_mean", **settings)


def best(files: RunFiles) -> str | None:
    return tagged_checkpoints(files).get("best")


def test_the_first_of_the_largest_values_is_the_best(files: RunFiles) -> None:
    assert tag_best(files, config()) == BestCheckpoint("step-000002", 2, 3.0)
    assert best(files) == "step-000002"
    assert tag_best(files, config()) is None, "the tag has not changed"
    assert sorted(path.name for path in files.checkpoints.iterdir() if path.is_symlink()) == ["best"]


def test_the_smallest_value_is_the_best_in_mode_min(files: RunFiles) -> None:
    tag_best(files, config())
    tag_best(files, config(best_mode="min"))
    assert best(files) == "step-000001"


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "high"])
def test_a_value_that_is_no_finite_number_is_never_the_best(value: Any, files: RunFiles) -> None:
    with files.metrics.open("a") as file:
        file.write(json.dumps({"step": 5, "reward_mean": value}) + "\n")
    add_checkpoint(files, 5)
    tag_best(files, config())
    assert best(files) == "step-000002"


def test_metrics_of_evaluations_are_read_from_their_file(files: RunFiles) -> None:
    files.evaluation_summaries.write_text('{"step": 0, "eval_kl": 0.0}\n{"step": 4, "eval_kl": 2.0}\n')
    tag_best(files, CheckpointConfig(best_metric="eval_kl", best_mode="min"))
    assert best(files) == "step-000004", "step 0 has no checkpoint"


def test_without_a_metric_or_a_value_there_is_no_best_checkpoint(files: RunFiles) -> None:
    for without in (CheckpointConfig(), CheckpointConfig(best_metric="value_loss")):
        tag_best(files, config())
        tag_best(files, without)
        assert best(files) is None


def test_a_checkpoint_without_a_readable_manifest_is_not_the_best(files: RunFiles) -> None:
    (files.checkpoints / "step-000002" / MANIFEST).write_text("{")
    tag_best(files, config())
    assert best(files) == "step-000003"


def test_a_link_that_a_crash_left_is_replaced(files: RunFiles) -> None:
    (files.checkpoints / ".best.new").symlink_to("step-000001")
    tag_best(files, config())
    assert tagged_checkpoints(files) == {"best": "step-000002"}


def test_the_best_checkpoint_is_a_checkpoint_name(files: RunFiles) -> None:
    tag_best(files, config())
    assert checkpoint_at(files, "best").step == 2


def test_a_rollback_takes_the_tag_from_a_dropped_checkpoint(files: RunFiles) -> None:
    tag_best(files, config())
    roll_back(files, 1)
    assert best(files) is None
    tag_best(files, config())
    assert best(files) == "step-000001"
