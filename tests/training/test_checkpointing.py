"""Checkpoints of a run: written during the next step, without effect on it, and not fatal if the disk is full."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.contract.control import RunState
from quartet.errors import ServiceUnavailable, StorageFailed
from quartet.models.weights import snapshot
from quartet.run_directory.run_files import RunFiles
from quartet.services import trainable_model as trained
from quartet.services.orchestrator.algorithm.update_request import start_update
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.step import StepTransaction
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    Run,
    active_run,
    orchestrator,
    run_to_completion,
    services,
    step_metrics,
    wait_for,
    weights,
)
from tests.training.test_resume import KINDS
from tests.waiting import LIMIT


def checkpoint_names(run: Run) -> list[str]:
    return sorted(path.name for path in run.files.checkpoints.iterdir())


PPO: dict[str, Any] = {**KINDS["ppo"], "run": {"steps": 6}}


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    """A run without checkpoints."""
    return run_to_completion(make(**PPO))


def test_a_run_with_checkpoints_is_bit_identical(make: MakeConfig, uninterrupted: Run) -> None:
    run = run_to_completion(make(**PPO, checkpoint={"every_steps": 1, "keep_last": 3}))
    assert checkpoint_names(run) == ["step-000004", "step-000005", "step-000006"]
    assert step_metrics(run) == step_metrics(uninterrupted)
    assert weights(run) == weights(uninterrupted)
    policy = {path.name: path.read_bytes() for path in run.files.policy.iterdir()}
    saved = run.files.checkpoints / "step-000006" / "actor"
    assert {name: (saved / name).read_bytes() for name in policy} == policy


@dataclass
class BlockedCheckpoints:
    """A writer that blocks checkpoints until the test sets ``proceed``."""

    started: threading.Event = field(default_factory=threading.Event)
    proceed: threading.Event = field(default_factory=threading.Event)

    def write(self, directory: Path, *writers: Any) -> None:
        if "checkpoints" in directory.parts:
            self.started.set()
            assert self.proceed.wait(LIMIT)
        snapshot.write_model(directory, *writers)


@pytest.fixture
def blocked_checkpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedCheckpoints]:
    blocked = BlockedCheckpoints()
    monkeypatch.setattr(trained, "write_model", blocked.write)
    yield blocked
    blocked.proceed.set()


def test_the_next_step_runs_during_a_checkpoint_up_to_its_update(
    make: MakeConfig, blocked_checkpoints: BlockedCheckpoints, uninterrupted: Run
) -> None:
    config = make(**PPO, checkpoint={"every_steps": 3})
    with active_run(config) as running:
        assert blocked_checkpoints.started.wait(LIMIT)
        wait_for(running, lambda: running.board.current().phase == "checkpoint")
        assert running.board.current().step == 3
        assert running.board.current().num_scored == config.rollout.prompts_per_step
        checkpoints = config.run_directory / "checkpoints"
        assert not list(checkpoints.rglob("manifest.json"))
        running.thread.join(0.3)
        assert running.board.current().step == 3, "an update changed the weights during the save"
        blocked_checkpoints.proceed.set()
        run = running.finish()
    assert checkpoint_names(run) == ["step-000003", "step-000006"]
    assert weights(run) == weights(uninterrupted)


def test_a_paused_run_has_a_complete_checkpoint(make: MakeConfig, blocked_checkpoints: BlockedCheckpoints) -> None:
    with active_run(make(run={"steps": 50}, checkpoint={"every_steps": 2})) as running:
        assert blocked_checkpoints.started.wait(LIMIT)
        running.control.pause()
        # The current step is the third, or still the second.
        blocked_checkpoints.proceed.set()
        wait_for(running, lambda: running.board.current().state is RunState.PAUSED)
        newest = running.board.current().step // 2 * 2
        checkpoint = running.config.run_directory / "checkpoints" / f"step-{newest:06d}"
        assert json.loads((checkpoint / "manifest.json").read_text())["step"] == newest


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, set[int]], None]:
    """Make the checkpoints of some steps fail in one service."""

    def fill(role: str, steps: set[int]) -> None:
        def write(directory: Path, *writers: Any) -> None:
            if directory.name == role and any(
                part.startswith(f".step-{step:06d}.") for step in steps for part in directory.parts
            ):
                raise StorageFailed(f"model directory {directory}: cannot be written: No space left on device")
            snapshot.write_model(directory, *writers)

        monkeypatch.setattr(trained, "write_model", write)

    return fill


def test_a_failed_checkpoint_becomes_a_note_and_the_run_continues(
    make: MakeConfig,
    full_disk: Callable[[str, set[int]], None],
    uninterrupted: Run,
    redis_client: Redis,
    redis_url: str,
) -> None:
    full_disk("critic", {4, 5})
    config = make(**{**PPO, "run": {"steps": 5}, "checkpoint": {"every_steps": 2, "keep_last": 5}})
    run = run_to_completion(config)
    assert run.progress.state is RunState.FINISHED
    assert checkpoint_names(run) == ["step-000002"]
    notes = [note for note in run.progress.notes if note.startswith("checkpoint of step")]
    assert [note.split(" failed: ")[0] for note in notes] == ["checkpoint of step 4", "checkpoint of step 5"]
    assert all("critic at " in note and "No space left on device" in note for note in notes)
    assert all("; the checkpoint of step 2 is kept; " in note for note in notes)
    assert run.files.policy.exists()
    experience = ExperienceStore(redis_client, redis_url, config.run.name)
    assert experience.holds(range(3, 6)), "experience after the last checkpoint was discarded"
    assert not experience.holds([2])
    # The disk has space again: the run continues from step 2, bit-identical to an uninterrupted run.
    full_disk("critic", set())
    tree = config.model_dump()
    tree["run"]["steps"] = 6
    longer = run_to_completion(type(config).model_validate(tree))
    assert checkpoint_names(longer)[-1] == "step-000006"
    assert checkpoint_names(longer)[0] == "step-000002"
    assert len(longer.metrics) == 6
    assert not experience.holds([6])


def test_a_failed_first_checkpoint_reports_that_there_is_none(
    make: MakeConfig, full_disk: Callable[[str, set[int]], None]
) -> None:
    full_disk("actor", {1})
    run = run_to_completion(make(run={"steps": 2}, checkpoint={"every_steps": 1}))
    assert [note for note in run.progress.notes if "there is none yet" in note]
    assert checkpoint_names(run) == ["step-000002"]


class Crash(Exception):
    """Exception that ends the training like a crash."""


def test_a_crash_during_a_checkpoint_resumes_from_the_previous_one(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has its manifest, and not its name yet."""
    config = make(**PPO, checkpoint={"every_steps": 2})
    real = Path.rename

    def crash_at_step_4(self: Path, *arguments: Any) -> Any:
        if self.name == ".step-000004.1.partial":
            raise Crash
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash_at_step_4)
        with active_run(config) as running:
            crashed = running.finish()
    assert crashed.code == 1
    assert checkpoint_names(crashed) == [".step-000004.1.partial", "step-000002"]
    assert (crashed.files.checkpoints / ".step-000004.1.partial" / "manifest.json").exists()
    run = run_to_completion(config)
    assert checkpoint_names(run) == ["step-000004", "step-000006"]
    assert weights(run) == weights(uninterrupted)
    assert step_metrics(run) == step_metrics(uninterrupted)


def test_a_stop_during_recovery_completes_a_step_that_one_model_has_applied(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StepTransaction._update
    lost: list[int] = []

    def lose_critic(self: Any, step: int, leadership: Any, *arguments: Any) -> Any:
        if step != 3 or lost:
            return real(self, step, leadership, *arguments)
        lost.append(step)
        update = start_update(self._run.clients.actor, config, step, leadership.epoch)
        assert update.result().step == 3
        control.stop()
        raise ServiceUnavailable("critic: gone")

    monkeypatch.setattr(StepTransaction, "_update", lose_critic)
    config = make(run={"steps": 8}, checkpoint={"every_steps": 5}, recovery={"max_recoveries": 1})
    control = RunControl(RunFiles(config.run_directory), persist=False)
    with services(config) as addressed, orchestrator(addressed, control) as running:
        run = running.finish()
    assert run.code == 0, run.progress.error
    assert lost == [3]
    assert run.progress.state is RunState.STOPPED
    assert len(run.metrics) == 3
    assert checkpoint_names(run) == ["step-000003"]
    assert run.files.policy.exists()
