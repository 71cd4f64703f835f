"""A run that loses a service or the contents of Redis recovers, bit-identical to an undisturbed run."""

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
from quartet.config import Config
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
from quartet.types import Alert, Role, RunState, Trajectory
from tests.e2e.commands import wait_until
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    ActiveRun,
    Fleet,
    Run,
    assert_same,
    fleet,
    json_lines,
    orchestrator,
    run_to_the_end,
    wait_for,
    weights,
)
from tests.training.test_resume import break_off, empty

STEPS = 5
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"score": {"normalize": "running"}},
    "recovery": {"backoff_seconds": 0.01},
}
MOMENTS = {"generate": "_prepare", "update": "_update", "commit": "_commit"}


@pytest.fixture(scope="module")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_the_end(make(**SHORT))


@contextmanager
def disturbed(
    config: Config, moment: str, disturb: Callable[[Fleet], None], monkeypatch: pytest.MonkeyPatch, times: int = 1
) -> Iterator[ActiveRun]:
    """A run of which ``disturb`` happens right before a moment of step 4, so many times."""
    method = MOMENTS[moment]
    real = getattr(StepTransaction, method)
    left = [times]

    def before(self: Any, step: int, *arguments: Any) -> Any:
        if step == 4 and left[0]:
            left[0] -= 1
            disturb(started)
        return real(self, step, *arguments)

    with fleet(config) as started, monkeypatch.context() as patch:
        patch.setattr(StepTransaction, method, before)
        with orchestrator(started.config) as active:
            yield active


def lost_for_a_while(config: Config, moment: str, role: Role, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that loses a service right before a moment of step 4, and has it back a little later."""
    back: list[threading.Timer] = []

    def lose(started: Fleet) -> None:
        started.lose(role)
        back.append(threading.Timer(0.3, started.start, [role]))
        back[0].start()

    with disturbed(config, moment, lose, monkeypatch) as active:
        run = active.finish()
        back[0].join(20)
    return run


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE])
def test_a_lost_service_is_restored_to_the_last_commit(
    role: Role, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(lost_for_a_while(make(**SHORT), moment, role, monkeypatch), undisturbed)


def test_a_recovery_is_shown_and_counted(make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with disturbed(make(**SHORT), "update", lambda started: started.restart(Role.CRITIC), monkeypatch) as active:
        run = active.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 1
    assert run.progress.state is RunState.FINISHED
    [note] = [note for note in run.progress.notes if note.startswith("recovering: ")]
    assert "critic" in note


def test_work_cancelled_by_a_recovery_does_not_count_as_hung(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, runs, result, failed = ComputeThread(), list[ActiveRun](), list[tuple[str, float]](), list[int]()
    update_policy, update_value = actor.update_policy, critic.update_value

    def is_back() -> bool:
        progress = runs[0].board.current()
        return (progress.recoveries, progress.state, progress.phase) == (1, RunState.TRAINING, "update")

    def slow(model: Any, optimizer: Any, experience: Any, *settings: Any) -> Any:
        if experience.step == 4 and not result:
            patient = time.monotonic() + 20
            while not is_back() and time.monotonic() < patient:
                time.sleep(0.01)
            # gRPC cancels a call that has no references left, at the latest now.
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

    monkeypatch.setattr(actor, "update_policy", slow)
    monkeypatch.setattr(critic, "update_value", fail)
    with fleet(make(**SHORT)) as started:
        started.lose(Role.ACTOR)
        started.start(Role.ACTOR, compute=compute)
        with orchestrator(started.config) as active:
            runs.append(active)
            run = active.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 1
    assert set(result) == {("", 0.0)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_data_lost_by_redis_is_sealed_again_or_recomputed(
    moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**SHORT)
    with disturbed(config, moment, lambda _: empty(redis_client, config.run.name), monkeypatch) as active:
        run = active.finish()
    assert_same(run, undisturbed)
    # The lease was lost with the rest, so the step is not committed under it.
    assert run.progress.recoveries >= 1


def test_a_step_that_one_model_has_applied_is_not_generated_again(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[int] = []
    real = StepTransaction._prepare

    def count(self: Any, step: int, leadership: Any) -> Any:
        generations.append(step)
        return real(self, step, leadership)

    monkeypatch.setattr(StepTransaction, "_prepare", count)
    with disturbed(
        make(**SHORT), "commit", lambda _: fail(ServiceUnavailable("a moment's loss")), monkeypatch
    ) as active:
        run = active.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 1
    assert generations == [1, 2, 3, 4, 5]


def fail(error: Exception) -> None:
    raise error


def test_late_trajectories_of_an_abandoned_generation_are_ignored(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trajectories are the same, but the order in which they come decides which are scored together."""
    late: list[tuple[Trajectory, int]] = []
    real = RolloutStream.append

    def append(self: RolloutStream, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        written = list(trajectories)
        if written[0].id.step == 4 and not late:
            late.extend((trajectory, leader_epoch) for trajectory in written)
            raise BufferFailed("the stream is gone for a moment")
        if written[0].id.step == 4:
            # What the first generation still has to write comes before anything of the second, and in another order.
            for trajectory, epoch in reversed(late):
                real(self, [trajectory], epoch)
        real(self, written, leader_epoch)

    monkeypatch.setattr(RolloutStream, "append", append)
    run = run_to_the_end(make(**SHORT))
    assert len(late) > 1
    assert run.progress.recoveries == 1
    assert_same(run, undisturbed)


def test_a_run_gives_up_after_the_configured_recoveries(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**{**SHORT, "recovery": {"backoff_seconds": 0.01, "max_recoveries": 2}})
    with disturbed(config, "update", lambda started: started.restart(Role.CRITIC), monkeypatch, times=9) as active:
        run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith(
        "gave up after 2 recoveries in a row without a further step; the last failure: "
    )
    assert len(run.metrics) == 3


def test_with_no_recoveries_the_first_failure_ends_the_run(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**{**SHORT, "recovery": {"max_recoveries": 0}})
    with disturbed(config, "update", lambda started: started.restart(Role.CRITIC), monkeypatch) as active:
        run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith("critic at ")
    assert run.progress.recoveries == 0


def test_a_service_that_comes_back_changed_ends_the_run(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**SHORT)
    other = config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": "bfloat16"})})

    def replace(started: Fleet) -> None:
        started.lose(Role.ACTOR)
        started.start(Role.ACTOR, other)

    with disturbed(config, "generate", replace, monkeypatch) as active:
        run = active.finish()
    assert run.code == 2
    assert "services.actor: came back with dtype 'bfloat16', expected 'float32'" in run.progress.error
    assert len(run.metrics) == 3


def test_a_stop_during_recovery_saves_the_policy_of_the_last_commit(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Fleet] = []

    def lose(started: Fleet) -> None:
        started.lose(Role.REWARD)
        lost.append(started)

    with disturbed(make(**SHORT), "generate", lose, monkeypatch) as active:
        # At its start the run waits for the reward, too.
        awaited = (RunState.RECOVERING, "waiting for reward")
        wait_for(active, lambda: (active.board.current().state, active.board.current().phase) == awaited)
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
    expected = run_to_the_end(make(**small_batches))
    asked: list[int] = []
    real = CriticClient.values

    def values(self: Any, batch: Any, policy_version: int | None = None) -> Any:
        asked.append(policy_version or 0)
        if asked.count(3) == 3:
            started.restart(Role.CRITIC)
        answer = real(self, batch, policy_version)
        # One after the other, so that what was answered before stays answered.
        assert wait_until(answer.done, 20)
        return answer

    with fleet(make(**small_batches)) as started, monkeypatch.context() as patch:
        patch.setattr(CriticClient, "values", values)
        with orchestrator(started.config) as active:
            run = active.finish()
    assert run.progress.recoveries == 1
    assert_same(run, expected)


def test_a_model_with_an_interrupted_update_is_restored(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("no memory left")]
    real = training_of_models.update_value

    def break_off(*arguments: Any) -> dict[str, float]:
        result = real(*arguments)
        if arguments[2].step == 4 and failures:
            raise failures.pop()
        return result

    monkeypatch.setattr(critic, "update_value", break_off)
    run = run_to_the_end(make(**SHORT))
    assert not failures
    assert run.progress.recoveries == 1
    assert_same(run, undisturbed)


def test_an_alert_is_applied_after_a_crash_before_its_action(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = {"window_steps": 2, "kl_runaway": {"above": 1e-6, "action": "pause"}}
    with fleet(make(**{**SHORT, "guards": guards})) as started:
        with monkeypatch.context() as patch:
            patch.setattr(AlertHandler, "apply", crash_after_the_first_step)
            with orchestrator(started.config) as active:
                broken = active.finish()
        assert broken.code == 1
        assert not broken.files.alerts.exists()
        with orchestrator(started.config) as active:
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

    def note(self: Any, step: int, leadership: Any) -> Any:
        result.append(step)
        return real(self, step, leadership)

    monkeypatch.setattr(StepTransaction, "_prepare", note)
    return result


@pytest.mark.parametrize(
    ("checkpoint", "lost"), [({"every_steps": 0}, []), ({"every_steps": 4}, [1]), ({"every_steps": 4}, [1, 2, 3])]
)
def test_committed_steps_on_which_both_models_stand_are_not_taken_again(
    checkpoint: dict[str, int],
    lost: list[int],
    make: MakeConfig,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    """Losing the buffer's data after a checkpoint does no harm: the data is not needed any more."""
    config = make(**{**SHORT, "checkpoint": checkpoint})
    generated = prepared_steps(monkeypatch)

    def lose(started: Fleet) -> None:
        for step in lost:
            redis_client.delete(f"quartet:{config.run.name}:experience:{step}")
        started.restart(Role.REWARD)
        fail(ServiceUnavailable("the reward is gone for a moment"))

    with disturbed(config, "commit", lose, monkeypatch) as active:
        run = active.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 1
    assert generated == [1, 2, 3, 4, 5]


def test_a_run_that_the_buffer_could_not_bring_to_where_it_stands_is_saved_at_once(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**{**SHORT, "checkpoint": {"every_steps": 5}})
    with disturbed(config, "generate", lambda _: empty(redis_client, config.run.name), monkeypatch) as active:
        run = active.finish()
    assert_same(run, undisturbed)
    assert [path.name for path in checkpoint_folders(run.files)] == ["step-000003", "step-000005"]


def test_a_stop_does_not_end_a_run_before_what_it_had_committed(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**{**SHORT, "run": {"steps": 9}, "checkpoint": {"every_steps": 6}})

    def lose(started: Fleet) -> None:
        active.control.stop()
        empty(redis_client, config.run.name)
        started.restart(Role.CRITIC)

    with disturbed(config, "generate", lose, monkeypatch) as active:
        run = active.finish()
    assert (run.code, run.progress.state) == (0, RunState.STOPPED)
    assert len(run.metrics) >= 3
    assert any("steps 1 to 3 are recomputed" in note for note in run.progress.notes)


def test_a_step_that_is_taken_again_has_the_learning_rate_that_it_had(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was made longer has another schedule from then on, and only from then on."""
    kind = {"actor": {"schedule": "cosine"}, "critic": {"schedule": "cosine"}, "checkpoint": {"every_steps": 4}}
    config = make(**{**SHORT, **kind})
    break_off(config, "generate", 4, monkeypatch)
    rates: list[tuple[int, float]] = []
    real = ActorClient.update

    def update(self: Any, run: str, step: int, epoch: int, settings: Any, loss: Any) -> Any:
        rates.append((step, settings.learning_rate))
        return real(self, run, step, epoch, settings, loss)

    monkeypatch.setattr(ActorClient, "update", update)
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 7})})
    run = run_to_the_end(longer)
    assert rates == [(int(step["step"]), step["learning_rate_actor"]) for step in run.metrics]


def test_a_guard_stop_survives_a_restart_of_the_orchestrator(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = {"window_steps": 2, "missing_eos": {"action": "stop", "below": 1.0}}
    with fleet(make(**{**SHORT, "guards": guards})) as started:
        files = RunFiles(started.config.run_directory)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointScheduler, "save_policy", lambda *_: (_ for _ in ()).throw(RuntimeError("crash")))
            with orchestrator(started.config, RunControl(files)) as active:
                first = active.finish()
        with orchestrator(started.config, RunControl(files)) as active:
            run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith("stopped by guard missing_eos after step ")
    assert len(run.metrics) == len(first.metrics) < STEPS
    assert weights(run)


def test_a_short_outage_does_not_verify_the_checkpoint(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = checkpoints.read_verified_checkpoint

    def note(path: Path) -> Any:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(checkpoints, "read_verified_checkpoint", note)
    with disturbed(make(**SHORT), "generate", lambda started: started.restart(Role.REWARD), monkeypatch) as active:
        assert_same(active.finish(), undisturbed)
    assert read == []
