"""A run that loses a service or the data in Redis recovers, bit-identical to an uninterrupted run."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.control import Alert, RunState
from quartet.contract.status import Role
from quartet.contract.trajectory import Trajectory
from quartet.errors import BufferFailed, ServiceUnavailable
from quartet.models.training import updates as training_of_models
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.run_directory.checkpoints import checkpoint_folders
from quartet.run_directory.run_files import RunFiles
from quartet.services.actor import actor
from quartet.services.critic import critic
from quartet.services.orchestrator.checkpointing import checkpoint_writer as checkpoints
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.control.alert_actions import AlertHandler
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.step import StepTransaction
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
from tests.training.test_resume import crash_run, delete_run_data
from tests.waiting import LIMIT, wait_until

STEPS = 5
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"score": {"normalize": "running"}},
    "recovery": {"backoff_seconds": 0.01},
}
MOMENTS = {"generate": "_prepare", "update": "_update", "commit": "_commit"}


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


@contextmanager
def run_with_fault(
    config: Config, moment: str, inject: Callable[[Fleet], None], monkeypatch: pytest.MonkeyPatch, times: int = 1
) -> Iterator[ActiveRun]:
    """Run the training and call ``inject`` right before a moment of step 4, at most ``times`` times."""
    method = MOMENTS[moment]
    real = getattr(StepTransaction, method)
    remaining = [times]

    def fault(self: Any, step: int, *arguments: Any) -> Any:
        if step == 4 and remaining[0]:
            remaining[0] -= 1
            inject(running_fleet)
        return real(self, step, *arguments)

    with fleet(config) as running_fleet, monkeypatch.context() as patch:
        patch.setattr(StepTransaction, method, fault)
        with orchestrator(running_fleet.config) as active:
            yield active


def run_with_lost_service(config: Config, moment: str, role: Role, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the training, stop a service right before a moment of step 4, and restart it 0.3 s later."""
    timers: list[threading.Timer] = []

    def lose(running_fleet: Fleet) -> None:
        running_fleet.lose(role)
        timers.append(threading.Timer(0.3, running_fleet.start, [role]))
        timers[0].start()

    with run_with_fault(config, moment, lose, monkeypatch) as active:
        run = active.finish()
        timers[0].join(LIMIT)
    return run


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE])
@pytest.mark.sampled(5)
def test_a_lost_service_is_restored_to_the_last_commit(
    role: Role, moment: str, make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(run_with_lost_service(make(**SHORT), moment, role, monkeypatch), uninterrupted)


def test_a_recovery_is_reported_and_counted(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_with_fault(
        make(**SHORT), "update", lambda running_fleet: running_fleet.restart(Role.CRITIC), monkeypatch
    ) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    assert run.progress.recoveries == 1
    assert run.progress.state is RunState.FINISHED
    [note] = [note for note in run.progress.notes if note.startswith("recovering: ")]
    assert "critic" in note


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


@pytest.mark.parametrize("moment", MOMENTS)
def test_data_lost_by_redis_is_sealed_again_or_recomputed(
    moment: str, make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**SHORT)
    with run_with_fault(
        config, moment, lambda _: delete_run_data(redis_client, config.run.name), monkeypatch
    ) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    # The lease is lost, too, so it cannot commit the step.
    assert run.progress.recoveries >= 1


def test_a_step_that_one_model_has_applied_is_not_generated_again(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[int] = []
    real = StepTransaction._prepare

    def count(self: Any, step: int, leadership: Any) -> Any:
        generations.append(step)
        return real(self, step, leadership)

    monkeypatch.setattr(StepTransaction, "_prepare", count)
    with run_with_fault(
        make(**SHORT), "commit", lambda _: fail(ServiceUnavailable("transient")), monkeypatch
    ) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    assert run.progress.recoveries == 1
    assert generations == [1, 2, 3, 4, 5]


def fail(error: Exception) -> None:
    raise error


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


def test_a_run_gives_up_after_the_configured_recoveries(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**{**SHORT, "recovery": {"backoff_seconds": 0.01, "max_recoveries": 2}})
    with run_with_fault(
        config, "update", lambda running_fleet: running_fleet.restart(Role.CRITIC), monkeypatch, times=9
    ) as active:
        run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith(
        "gave up after 2 recoveries in a row without a further step, the limit of recovery.max_recoveries; fix the cause and "
        "continue with --resume, or raise the limit; the last failure: "
    )
    assert len(run.metrics) == 3


def test_with_no_recoveries_the_first_failure_ends_the_run(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**{**SHORT, "recovery": {"max_recoveries": 0}})
    with run_with_fault(
        config, "update", lambda running_fleet: running_fleet.restart(Role.CRITIC), monkeypatch
    ) as active:
        run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith("critic at ")
    assert run.progress.recoveries == 0


def test_a_service_that_returns_with_another_dtype_ends_the_run(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**SHORT)
    other = config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": "bfloat16"})})

    def replace(running_fleet: Fleet) -> None:
        running_fleet.lose(Role.ACTOR)
        running_fleet.start(Role.ACTOR, other)

    with run_with_fault(config, "generate", replace, monkeypatch) as active:
        run = active.finish()
    assert run.code == 2
    assert "services.actor: came back with dtype 'bfloat16', expected 'float32'" in run.progress.error
    assert len(run.metrics) == 3


def test_a_stop_during_recovery_saves_the_policy_of_the_last_commit(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Fleet] = []

    def lose(running_fleet: Fleet) -> None:
        running_fleet.lose(Role.REWARD)
        lost.append(running_fleet)

    with run_with_fault(make(**SHORT), "generate", lose, monkeypatch) as active:
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


def test_values_of_a_critic_restarted_during_a_step_are_not_used(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches = {**SHORT, "rollout": {"score_batch_size": 1}}
    expected = run_to_completion(make(**small_batches))
    versions: list[int] = []
    real = CriticClient.values

    def values(self: Any, batch: Any, policy_version: int | None = None) -> Any:
        versions.append(policy_version or 0)
        if versions.count(3) == 3:
            running_fleet.restart(Role.CRITIC)
        call = real(self, batch, policy_version)
        # Wait for each call, so that the earlier calls have succeeded.
        wait_until(call.done)
        return call

    with fleet(make(**small_batches)) as running_fleet, monkeypatch.context() as patch:
        patch.setattr(CriticClient, "values", values)
        with orchestrator(running_fleet.config) as active:
            run = active.finish()
    assert run.progress.recoveries == 1
    assert_same(run, expected)


def test_a_model_with_an_interrupted_update_is_restored(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("no memory left")]
    real = training_of_models.update_value

    def fail_after_update(*arguments: Any) -> dict[str, float]:
        result = real(*arguments)
        if arguments[2].step == 4 and failures:
            raise failures.pop()
        return result

    monkeypatch.setattr(critic, "update_value", fail_after_update)
    run = run_to_completion(make(**SHORT))
    assert not failures
    assert run.progress.recoveries == 1
    assert_same(run, uninterrupted)


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


def prepared_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record every generated step, in order."""
    result: list[int] = []
    real = StepTransaction._prepare

    def record(self: Any, step: int, leadership: Any) -> Any:
        result.append(step)
        return real(self, step, leadership)

    monkeypatch.setattr(StepTransaction, "_prepare", record)
    return result


@pytest.mark.parametrize(
    ("checkpoint", "lost"), [({"every_steps": 0}, []), ({"every_steps": 4}, [1]), ({"every_steps": 4}, [1, 2, 3])]
)
def test_steps_that_both_models_have_applied_are_not_recomputed(
    checkpoint: dict[str, int],
    lost: list[int],
    make: MakeConfig,
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    """Experience from before the checkpoint is not required."""
    config = make(**{**SHORT, "checkpoint": checkpoint})
    generated = prepared_steps(monkeypatch)

    def lose(running_fleet: Fleet) -> None:
        for step in lost:
            redis_client.delete(f"quartet:{config.run.name}:experience:{step}")
        running_fleet.restart(Role.REWARD)
        fail(ServiceUnavailable("reward: transient"))

    with run_with_fault(config, "commit", lose, monkeypatch) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    assert run.progress.recoveries == 1
    assert generated == [1, 2, 3, 4, 5]


def test_a_checkpoint_is_saved_at_once_if_the_buffer_has_lost_experience(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**{**SHORT, "checkpoint": {"every_steps": 5}})
    with run_with_fault(
        config, "generate", lambda _: delete_run_data(redis_client, config.run.name), monkeypatch
    ) as active:
        run = active.finish()
    assert_same(run, uninterrupted)
    assert [path.name for path in checkpoint_folders(run.files)] == ["step-000003", "step-000005"]


def test_a_stop_during_recovery_first_recomputes_the_committed_steps(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**{**SHORT, "run": {"steps": 9}, "checkpoint": {"every_steps": 6}})

    def lose(running_fleet: Fleet) -> None:
        active.control.stop()
        delete_run_data(redis_client, config.run.name)
        running_fleet.restart(Role.CRITIC)

    with run_with_fault(config, "generate", lose, monkeypatch) as active:
        run = active.finish()
    assert (run.code, run.progress.state) == (0, RunState.STOPPED)
    assert len(run.metrics) >= 3
    assert any("steps 1 to 3 are recomputed" in note for note in run.progress.notes)


def test_a_recomputed_step_has_its_original_learning_rate(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps change the schedule of the steps after the resume only."""
    kind = {"actor": {"schedule": "cosine"}, "critic": {"schedule": "cosine"}, "checkpoint": {"every_steps": 4}}
    config = make(**{**SHORT, **kind})
    crash_run(config, "generate", 4, monkeypatch)
    rates: list[tuple[int, float]] = []
    real = ActorClient.update

    def update(self: Any, run: str, step: int, epoch: int, settings: Any, loss: Any) -> Any:
        rates.append((step, settings.learning_rate))
        return real(self, run, step, epoch, settings, loss)

    monkeypatch.setattr(ActorClient, "update", update)
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 7})})
    run = run_to_completion(longer)
    assert rates == [(int(step["step"]), step["learning_rate_actor"]) for step in run.metrics]


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


def test_a_short_outage_does_not_verify_the_checkpoint(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = checkpoints.read_verified_checkpoint

    def record(path: Path) -> Any:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(checkpoints, "read_verified_checkpoint", record)
    with run_with_fault(
        make(**SHORT), "generate", lambda running_fleet: running_fleet.restart(Role.REWARD), monkeypatch
    ) as active:
        assert_same(active.finish(), uninterrupted)
    assert read == []
