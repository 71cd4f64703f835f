"""A run that loses a service or the data in Redis recovers, bit-identical to an uninterrupted run."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.control import Alert, RunState
from quartet.contract.status import Role
from quartet.contract.trajectory import Trajectory
from quartet.errors import BufferFailed
from quartet.rpc.compute_thread import ComputeThread
from quartet.run_directory.checkpoints import checkpoint_folders
from quartet.run_directory.run_files import RunFiles
from quartet.services.actor import actor
from quartet.services.critic import critic
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.training_run import AlertHandler
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    ActiveRun,
    Fleet,
    Run,
    assert_same,
    fleet,
    json_lines,
    orchestrator,
    run_to_completion,
    wait_for,
    weights,
)
from tests.training.test_resume import delete_run_data
from tests.waiting import LIMIT, wait_until

STEPS = 5
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"score": {"normalize": "running"}},
    "recovery": {"backoff_seconds": 0.01},
}
MOMENTS = {"generate": "_prepare", "update": "_update", "commit": "_commit"}
Fault = Callable[[Fleet], None]


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


@contextmanager
def run_with_faults(
    config: Config, faults: dict[tuple[int, str], Fault], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ActiveRun]:
    """Run the training. Call each fault once, right before its (step, moment)."""
    with fleet(config) as running_fleet, monkeypatch.context() as patch:

        def injected(moment: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, step: int, *arguments: Any) -> Any:
                if fault := faults.pop((step, moment), None):
                    fault(running_fleet)
                return real(self, step, *arguments)

            return call

        for moment, method in MOMENTS.items():
            patch.setattr(StepTransaction, method, injected(moment, getattr(StepTransaction, method)))
        with orchestrator(running_fleet.config) as active:
            yield active


def run_with_lost_services(config: Config, losses: dict[tuple[int, str], Role], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the training. Stop a service right before each (step, moment), and start it again while the run waits for it."""
    restarts: list[threading.Timer] = []

    def loss(role: Role) -> Fault:
        def lose(running_fleet: Fleet) -> None:
            running_fleet.lose(role)
            restarts.append(threading.Timer(0.05, running_fleet.start, [role]))
            restarts[-1].start()

        return lose

    faults = {place: loss(role) for place, role in losses.items()}
    with run_with_faults(config, faults, monkeypatch) as active:
        run = active.finish()
        for restart in restarts:
            restart.join(LIMIT)
    assert not faults
    return run


def test_lost_services_are_restored_to_the_last_commit(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {
        (2, "generate"): Role.REFERENCE,
        (3, "update"): Role.ACTOR,
        (4, "generate"): Role.REWARD,
        (4, "commit"): Role.CRITIC,
        (5, "update"): Role.CRITIC,
    }
    run = run_with_lost_services(make(**SHORT), losses, monkeypatch)
    assert_same(run, uninterrupted)
    assert run.progress.state is RunState.FINISHED
    notes = [note for note in run.progress.notes if note.startswith("recovering: ")]
    assert len(notes) == run.progress.recoveries
    assert {note.split()[1] for note in notes} >= {"actor", "critic"}


def test_data_lost_by_redis_is_sealed_again_or_recomputed(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    """The lease is lost, too, so the step cannot be committed before a recovery, which also saves what only the models have."""
    config = make(**{**SHORT, "checkpoint": {"every_steps": 5, "keep_last": 5}})
    faults: dict[tuple[int, str], Fault] = dict.fromkeys(
        [(3, "generate"), (4, "update"), (5, "commit")], lambda _: delete_run_data(redis_client, config.run.name)
    )
    with run_with_faults(config, faults, monkeypatch) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    assert not faults
    assert run.progress.recoveries >= 2
    # The buffer had lost the experience of steps 1 and 2, and no model was ahead of the last commit.
    assert "step-000002" in [path.name for path in checkpoint_folders(run.files)]


def test_work_cancelled_by_a_recovery_does_not_count_as_hung(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, runs, result, failed = ComputeThread(), list[ActiveRun](), list[tuple[str, float]](), list[int]()
    update_policy, update_value = actor.update_policy, critic.update_value

    def has_recovered() -> bool:
        progress = runs[0].board.current()
        return (progress.recoveries, progress.state, progress.phase) == (1, RunState.TRAINING, "update")

    def slow_update(model: Any, optimizer: Any, experience: Any, *settings: Any) -> Any:
        if experience.step == 4 and not result:
            wait_until(has_recovered)
            # Collect the call without references, so that gRPC cancels it now at the latest.
            gc.collect()
            for _ in range(20):
                time.sleep(0.01)
                result.append(compute.abandoned())
        return update_policy(model, optimizer, experience, *settings)

    def fail(model: Any, optimizer: Any, experience: Any, *settings: Any) -> Any:
        if experience.step == 4 and not failed:
            failed.append(4)
            raise RuntimeError("once")
        return update_value(model, optimizer, experience, *settings)

    monkeypatch.setattr(actor, "update_policy", slow_update)
    monkeypatch.setattr(critic, "update_value", fail)
    with fleet(make(**SHORT)) as running_fleet:
        running_fleet.lose(Role.ACTOR)
        running_fleet.start(Role.ACTOR, compute=compute)
        with orchestrator(running_fleet.config) as active:
            runs.append(active)
            run = active.finish()
    assert_same(run, uninterrupted)
    assert run.progress.recoveries == 1
    assert set(result) == {("", 0.0)}


def test_late_trajectories_of_an_abandoned_generation_are_ignored(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late trajectories are equal, but their order would change the composition of scoring batches."""
    late: list[tuple[Trajectory, int]] = []
    real = RolloutStream.append

    def append(self: RolloutStream, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        written = list(trajectories)
        if written[0].id.step == 4 and not late:
            late.extend((trajectory, leader_epoch) for trajectory in written)
            raise BufferFailed("transient")
        if written[0].id.step == 4:
            # Write the late entries of the first generation before those of the second, and in reverse order.
            for trajectory, epoch in reversed(late):
                real(self, [trajectory], epoch)
        real(self, written, leader_epoch)

    monkeypatch.setattr(RolloutStream, "append", append)
    run = run_to_completion(make(**SHORT))
    assert len(late) > 1
    assert run.progress.recoveries == 1
    assert_same(run, uninterrupted)


def test_a_stop_during_recovery_saves_the_policy_of_the_last_commit(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Fleet] = []

    def lose(running_fleet: Fleet) -> None:
        running_fleet.lose(Role.REWARD)
        lost.append(running_fleet)

    with run_with_faults(make(**SHORT), {(4, "generate"): lose}, monkeypatch) as active:
        # The state RECOVERING excludes the wait at the start of the run.
        waiting_for_reward = (RunState.RECOVERING, "waiting for reward")
        wait_for(active, lambda: (active.board.current().state, active.board.current().phase) == waiting_for_reward)
        active.control.stop()
        lost[0].start(Role.REWARD)
        run = active.finish()
    assert run.code == 0
    assert run.progress.state is RunState.STOPPED
    assert len(run.metrics) == 3
    assert weights(run)


def test_an_alert_is_applied_after_a_crash_before_its_action(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = {"window_steps": 2, "missing_eos": {"action": "pause"}}
    with fleet(make(**{**SHORT, "guards": guards})) as running_fleet:
        with monkeypatch.context() as patch:
            patch.setattr(AlertHandler, "apply", crash_after_the_first_step)
            with orchestrator(running_fleet.config) as active:
                broken = active.finish()
        assert broken.code == 1
        assert not broken.files.alerts.exists()
        with orchestrator(running_fleet.config) as active:
            wait_for(active, lambda: active.board.current().state is RunState.PAUSED)
            assert active.board.current().notes[-1] == f"resumed after step {len(broken.metrics)}"
            assert "pause" in [alert["action"] for alert in json_lines(broken.files.alerts)]


def crash_after_the_first_step(_: Any, alerts: list[Alert]) -> None:
    if alerts:
        raise RuntimeError("crash")


def test_a_stop_during_recovery_first_recomputes_the_committed_steps(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**{**SHORT, "checkpoint": {"every_steps": 5}})

    def lose(running_fleet: Fleet) -> None:
        active.control.stop()
        delete_run_data(redis_client, config.run.name)
        running_fleet.restart(Role.CRITIC)

    with run_with_faults(config, {(4, "generate"): lose}, monkeypatch) as active:
        run = active.finish()
    assert (run.code, run.progress.state) == (0, RunState.STOPPED)
    assert len(run.metrics) >= 3
    assert any("steps 1 to 3 are recomputed" in note for note in run.progress.notes)


def test_a_guard_stop_survives_a_restart_of_the_orchestrator(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = {"window_steps": 2, "missing_eos": {"action": "stop", "below": 1.0}}
    with fleet(make(**{**SHORT, "guards": guards})) as running_fleet:
        files = RunFiles(running_fleet.config.run_directory)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointScheduler, "save_policy", lambda *_: (_ for _ in ()).throw(RuntimeError("crash")))
            with orchestrator(running_fleet.config, RunControl(files)) as active:
                first = active.finish()
        with orchestrator(running_fleet.config, RunControl(files)) as active:
            run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith("stopped by guard missing_eos after step ")
    assert len(run.metrics) == len(first.metrics) < STEPS
    assert weights(run)
