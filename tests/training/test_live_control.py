"""Live changes of settings, requested checkpoints and rollbacks, also after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.config.deployment import RecoveryConfig
from quartet.config.root import Config
from quartet.contract.control import RunState
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest, ServiceUnavailable
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.checkpointing.recovery import RecoveryAttempts
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.handshake import ServiceHandshake
from quartet.services.orchestrator.step import StepTransaction
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    ActiveRun,
    Run,
    active_run,
    orchestrator,
    run_to_completion,
    services,
    step_metrics,
    wait_for,
    weights,
)
from tests.training.test_resume import run_with_crashes
from tests.waiting import LIMIT

STEPS = 6
PPO: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2, "keep_last": 9},
    "recovery": {"backoff_seconds": 0.01},
}
Command = Callable[[ActiveRun, int], None]


@contextmanager
def run_with_commands(
    config: Config,
    commands: dict[int, Callable[[Any], None]],
    monkeypatch: pytest.MonkeyPatch,
    control: RunControl | None = None,
) -> Iterator[ActiveRun]:
    """Run the training and call each command once, at the start of the step with its number."""
    real, remaining = StepTransaction._prepare, dict(commands)
    started: Future[ActiveRun] = Future()

    def prepare(self: Any, step: int, leadership: Any) -> Any:
        if step in remaining:
            remaining.pop(step)(started.result(LIMIT))
        return real(self, step, leadership)

    monkeypatch.setattr(StepTransaction, "_prepare", prepare)
    if config.services.actor.address:
        with orchestrator(config, control) as active:
            started.set_result(active)
            yield active
    else:
        with active_run(config) as active:
            started.set_result(active)
            yield active


def changed(values: dict[str, float], user: str = "operator 127.0.0.1") -> Callable[[Any], None]:
    return lambda running: running.live_settings.change(values, user) and None


@pytest.fixture(scope="module")
def plain(make: MakeConfig) -> Run:
    """A run without commands."""
    return run_to_completion(make(**PPO))


def test_a_change_applies_from_the_next_step(make: MakeConfig, plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"kl_coefficient": 0.2, "actor.learning_rate": 5e-4}
    with run_with_commands(make(**PPO), {3: changed(values)}, monkeypatch) as active:
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert step_metrics(run)[:3] == step_metrics(plain)[:3]
    assert [step["kl_coefficient"] for step in run.metrics] == [0.05, 0.05, 0.05, 0.2, 0.2, 0.2]
    before = [step["learning_rate_actor"] for step in plain.metrics]
    assert [step["learning_rate_actor"] for step in run.metrics] == before[:3] + [rate * 0.5 for rate in before[3:]]
    assert [step["learning_rate_critic"] for step in run.metrics] == [
        step["learning_rate_critic"] for step in plain.metrics
    ]
    assert weights(run) != weights(plain)
    lines = [json.loads(line) for line in run.files.changes.read_text().splitlines()]
    assert [(line["setting"], line["before"], line["after"], line["step"]) for line in lines] == [
        ("kl_coefficient", 0.05, 0.2, 4),
        ("actor.learning_rate", 1e-3, 5e-4, 4),
    ]
    assert {line["user"] for line in lines} == {"operator 127.0.0.1"}


def test_a_run_with_changes_that_crashes_at_every_point_resumes_bit_identically(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {**PPO, "run": {"steps": 5}, "checkpoint": {"every_steps": 4}}
    values = {"kl_coefficient": 0.4, "actor.learning_rate": 2e-3}
    with monkeypatch.context() as patch, run_with_commands(make(**config), {2: changed(values)}, patch) as active:
        expected = active.finish()
    assert expected.code == 0, expected.progress.error
    real = StepTransaction._prepare

    def prepare(self: Any, now: int, leadership: Any) -> Any:
        changes = self._run.live_settings
        if now == 2 and changes.settings()[0].value != 0.4:
            changes.change(values, "alice")
        return real(self, now, leadership)

    crashes = [*((point, 3) for point in ("generate", "sealed", "updated", "committed")), ("updated", 5)]
    with monkeypatch.context() as patch:
        patch.setattr(StepTransaction, "_prepare", prepare)
        run = run_with_crashes(make(**config), crashes, patch)
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)


def test_an_adaptive_controller_continues_from_the_value_that_was_set(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive = {
        **PPO,
        "run": {"steps": 4},
        "algorithm": {"kl_controller": {"kind": "adaptive", "target": 0.001, "horizon": 100}},
    }
    with run_with_commands(make(**adaptive), {2: changed({"kl_coefficient": 0.3})}, monkeypatch) as active:
        run = active.finish()
    coefficients = [step["kl_coefficient"] for step in run.metrics]
    assert coefficients[2] == 0.3
    assert coefficients[3] != 0.3
    assert abs(coefficients[3] / 0.3 - 1) < 0.05


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_coefficient": -0.1}, "kl_coefficient -0.1: expected 0 to 1"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient nan: expected 0 to 1"),
        ({"actor.learning_rate": 0.011}, "actor.learning_rate 0.011: expected 0 to 0.01"),
        ({"kl_coefficient": 0.1, "reward.learning_rate": 1.0}, "reward.learning_rate: not a live setting"),
        ({}, "none given"),
    ],
)
def test_an_invalid_change_is_refused_and_changes_nothing(
    values: dict[str, float], message: str, make: MakeConfig
) -> None:
    config = make(**PPO)
    changes = live_settings_of(config)
    changes.resume(0, AlgorithmState(config))
    before = changes.settings()
    with pytest.raises(InvalidRequest) as error:
        changes.change(values, "alice")
    assert message in str(error.value)
    assert not RunFiles(config.run_directory).changes.exists()
    assert changes.settings() == before


@pytest.mark.parametrize("user", ["x" * 201, "two\nlines"])
def test_the_user_of_a_setting_change_is_one_short_line(make: MakeConfig, user: str) -> None:
    config = make(**PPO)
    changes = live_settings_of(config)
    changes.resume(0, AlgorithmState(config))
    with pytest.raises(InvalidRequest, match="user: expected one line of at most 200 characters"):
        changes.change({"kl_coefficient": 0.1}, user)
    assert {setting.value for setting in changes.settings() if setting.name == "kl_coefficient"} == {0.05}


def test_changes_are_refused_before_the_first_step_and_in_the_last_step(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**{**PPO, "run": {"steps": 1}})
    early = live_settings_of(config)
    assert early.settings() == []
    with pytest.raises(FailedPrecondition, match="has not started yet"):
        early.change({"kl_coefficient": 0.1}, "alice")
    late: list[str] = []

    def command(running: Any) -> None:
        with pytest.raises(FailedPrecondition) as error:
            running.live_settings.change({"kl_coefficient": 0.1}, "alice")
        late.append(str(error.value))

    with run_with_commands(config, {1: command}, monkeypatch) as active:
        active.finish()
    assert "the last step has started" in late[0]


def live_settings_of(config: Config) -> LiveSettings:
    files = RunFiles(config.run_directory)
    return LiveSettings(config, files, RunControl(files, persist=False))


def checkpoint_names(run: Run) -> list[str]:
    return sorted(path.name for path in run.files.checkpoints.iterdir())


def test_a_requested_checkpoint_is_saved(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**{**PPO, "run": {"steps": 4}, "checkpoint": {"every_steps": 0}})
    with run_with_commands(config, {2: lambda running: running.control.checkpoint()}, monkeypatch) as active:
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert checkpoint_names(run) == ["step-000002"]


def test_a_paused_run_saves_a_checkpoint_and_rolls_back(
    make: MakeConfig, plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:

    def pause(running: Any) -> None:
        running.control.pause()

    with run_with_commands(
        make(**{**PPO, "checkpoint": {"every_steps": 2, "keep_last": 9}}), {3: pause}, monkeypatch
    ) as active:
        wait_for(active, lambda: active.board.current().state is RunState.PAUSED)
        active.control.checkpoint()
        folder = RunFiles(active.config.run_directory).checkpoints / "step-000003" / "manifest.json"
        wait_for(active, folder.exists)
        active.control.roll_back(2)
        wait_for(active, lambda: (active.board.current().state, active.board.current().step) == (RunState.PAUSED, 2))
        assert len(RunFiles(active.config.run_directory).read_committed()) == 2
        active.control.resume()
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert checkpoint_names(run) == ["step-000002", "step-000004", "step-000006"]
    assert step_metrics(run) == step_metrics(plain)
    assert weights(run) == weights(plain)
    assert "rolled back to step 2, as requested" in run.progress.notes


def test_a_rollback_is_refused_without_a_checkpoint_and_past_a_tagged_checkpoint(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (2, 4):
        (files.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    control = RunControl(files, persist=False)
    control.open()
    with pytest.raises(InvalidRequest) as missing:
        control.roll_back(3)
    assert str(missing.value) == "step 3: has no checkpoint; checkpoints exist for: 2, 4"
    (files.checkpoints / "good").symlink_to("step-000004")
    with pytest.raises(FailedPrecondition, match="step-000004 is tagged good"):
        control.roll_back(2)
    assert control.rollback_step == 0


def test_a_rollback_drops_later_changes_and_its_checkpoint_is_kept_until_then(
    make: MakeConfig, plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**{**PPO, "checkpoint": {"every_steps": 2, "keep_last": 2}})
    commands = {
        4: changed({"kl_coefficient": 0.5, "critic.learning_rate": 3e-3}),
        6: lambda running: running.control.roll_back(2),
    }
    control = RunControl(RunFiles(config.run_directory))
    with services(config) as addressed, run_with_commands(addressed, commands, monkeypatch, control) as active:
        run = active.finish()
    assert run.code == 0, run.progress.error
    # The rollback takes effect after step 6, the last one. Its steps are recomputed without the changes.
    assert "rolled back to step 2, as requested" in run.progress.notes
    assert checkpoint_names(run) == ["step-000004", "step-000006"]
    assert step_metrics(run) == step_metrics(plain)
    assert weights(run) == weights(plain)
    assert run.files.changes.read_text() == ""


@pytest.mark.parametrize("crash_point", ["truncate_changes_after", "truncate_after"])
def test_an_interrupted_rollback_is_completed(
    crash_point: str, make: MakeConfig, plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**PPO)
    files = RunFiles(config.run_directory)
    commands = {4: changed({"kl_coefficient": 0.5}), 5: lambda running: running.control.roll_back(2)}
    real = getattr(RunFiles, crash_point)

    def crash(self: Any, step: int) -> None:
        # Recovery also truncates, with step 0 at the start of the run.
        if step == 2:
            raise RuntimeError("a crash")
        real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, crash_point, crash)
        with services(config) as addressed, run_with_commands(addressed, commands, patch, RunControl(files)) as active:
            assert active.finish().code == 1
    # A new run removes old requests. Only the rollback remains.
    files.pending_commands.unlink(missing_ok=True)
    with services(config) as addressed, orchestrator(addressed, RunControl(files)) as active:
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert step_metrics(run) == step_metrics(plain)
    assert weights(run) == weights(plain)
    assert not run.files.rolling_back.exists()


def test_changes_are_refused_during_a_rollback(make: MakeConfig, plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    real, active_runs = ServiceHandshake.reconnect, list[ActiveRun]()

    def command(running: Any) -> None:
        with pytest.raises(FailedPrecondition) as error:
            running.live_settings.change({"kl_coefficient": 0.5}, "alice")
        refused.append(str(error.value))

    def reconnect(self: Any, *arguments: Any) -> Any:
        command(active_runs[0])
        return real(self, *arguments)

    monkeypatch.setattr(ServiceHandshake, "reconnect", reconnect)

    def roll_back(running: Any) -> None:
        active_runs.append(running)
        running.control.roll_back(2)
        command(running)

    with run_with_commands(make(**PPO), {5: roll_back}, monkeypatch) as active:
        run = active.finish()
    assert len(refused) == 2
    assert "rolls back to step 2" in refused[0]
    assert step_metrics(run) == step_metrics(plain)


def test_commands_are_refused_at_the_end_of_the_run(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    real = CheckpointScheduler.save_policy

    def save(self: Any, step: int, epoch: int) -> None:
        for command in (controls[0].pause, controls[0].checkpoint, lambda: controls[0].roll_back(2)):
            with pytest.raises(FailedPrecondition, match="at its end"):
                command()
            refused.append("refused")
        controls[0].resume()
        controls[0].stop()
        real(self, step, epoch)

    controls: list[Any] = []
    monkeypatch.setattr(CheckpointScheduler, "save_policy", save)
    config = make(**{**PPO, "run": {"steps": 2}})
    with run_with_commands(config, {1: lambda running: controls.append(running.control)}, monkeypatch) as active:
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert len(refused) == 3
    assert run.progress.state is RunState.FINISHED


def test_a_restarted_orchestrator_reads_the_pending_commands(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    (files.checkpoints / "step-000004").mkdir(parents=True)
    before = RunControl(files)
    before.pause()
    before.checkpoint()
    before.roll_back(4)
    restarted = RunControl(files)
    assert (restarted.paused, restarted.rollback_step, restarted.take_checkpoint_command()) == (True, 4, True)
    restarted.finish_rollback()
    restarted.resume()
    last = RunControl(files)
    assert (last.paused, last.rollback_step, last.take_checkpoint_command()) == (False, 0, False)
    assert list(tmp_path.iterdir()) == [files.checkpoints]


def test_a_rollback_resets_the_recovery_count() -> None:
    attempts = RecoveryAttempts(RecoveryConfig(max_recoveries=1, backoff_seconds=0.01))
    attempts.record_commit(50)
    attempts.record_rollback(20)
    for step in (21, 22, 23):
        attempts.pause_after(ServiceUnavailable("gone"))
        attempts.record_commit(step)


def test_a_malformed_change_line_is_reported(make: MakeConfig) -> None:
    config = make(**PPO)
    files = RunFiles(config.run_directory)
    files.root.mkdir(parents=True)
    files.changes.write_text('{"step": 2, "setting": "kl_coefficient"}\n')
    with pytest.raises(ConfigError, match=r"changes .*changes\.jsonl:1: is not a change of a setting"):
        live_settings_of(config).resume(1, AlgorithmState(config))
