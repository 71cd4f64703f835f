"""Failures of a checkpoint: a full disk becomes a note of the run, any other failure is raised."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.contract.status import Role
from quartet.errors import OutOfMemory, QuartetError, ServiceFailed, StorageFailed
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from tests.services.orchestrator.checkpointing.test_checkpoint_writer import Saver


class TrainedClients:
    """The clients of the trained models."""

    def __init__(self, *savers: Saver) -> None:
        self.trained = savers


class NoExperience:
    """A buffer without experience."""

    def discard(self, steps: range) -> None:
        pass


def scheduler(
    folder: Path, board: ProgressBoard, *savers: Saver, best_metric: str | None = None
) -> CheckpointScheduler:
    tree: dict[str, Any] = {
        "run": {"directory": str(folder), "name": "run"},
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "checkpoint": {"every_steps": 2, "best_metric": best_metric},
    }
    config = parse_config(tree, "test")
    run: Any = SimpleNamespace(
        config=config,
        files=RunFiles(folder),
        clients=TrainedClients(*savers),
        experience=NoExperience(),
        board=board,
        profiler=StepProfiler(),
    )
    return CheckpointScheduler(run)


def no_lease() -> None:
    pass


def test_a_full_disk_becomes_a_note_and_the_run_continues(tmp_path: Path) -> None:
    saver, board = Saver(Role.ACTOR, tmp_path), ProgressBoard("run", 4)
    checkpoints = scheduler(tmp_path, board, saver)
    saver.failure = StorageFailed("actor: No space left on device")
    checkpoints.start(2, 1, {})
    checkpoints.finish(no_lease)
    assert checkpoints.newest_step == 0
    [note] = board.current().notes
    assert note.startswith("checkpoint of step 2 failed: actor: No space left on device; there is none yet")


@pytest.mark.parametrize("failure", [ServiceFailed("actor: internal error"), OutOfMemory("actor: out of GPU memory")])
def test_any_other_failure_of_a_save_is_raised(tmp_path: Path, failure: QuartetError) -> None:
    saver, board = Saver(Role.ACTOR, tmp_path), ProgressBoard("run", 4)
    checkpoints = scheduler(tmp_path, board, saver)
    saver.failure = failure
    checkpoints.start(2, 1, {})
    with pytest.raises(type(failure), match="actor: "):
        checkpoints.finish(no_lease)
    assert board.current().notes == []
    saver.failure = None
    assert checkpoints.is_due(2, last=False, requested=False), "the failed checkpoint is due again after recovery"
    checkpoints.start(2, 1, {})
    checkpoints.finish(no_lease)
    assert checkpoints.newest_step == 2


@pytest.mark.parametrize("name", ["reward_mean", "kl_mean"])
def test_the_first_checkpoint_without_a_value_of_the_best_metric_is_noted_once(name: str, tmp_path: Path) -> None:
    saver, board = Saver(Role.ACTOR, tmp_path), ProgressBoard("run", 4)
    checkpoints = scheduler(tmp_path, board, saver, best_metric="reward_mean")
    RunFiles(tmp_path).metrics.write_text(
        "".join(json.dumps({"step": step, name: 0.5}) + "\n" for step in (1, 2, 3, 4))
    )
    for step in (2, 4):
        checkpoints.start(step, 1, {})
        checkpoints.finish(no_lease)
    missing = [note for note in board.current().notes if "reward_mean has no finite value" in note]
    assert len(missing) == (0 if name == "reward_mean" else 1)
    assert all("checkpoint of step 2 cannot be the best" in note for note in missing)
