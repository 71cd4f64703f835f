"""Recovery to the last committed step: every state in which a failure can leave models, checkpoint and buffer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet import errors
from quartet.config.deployment import RecoveryConfig
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.control import SettingChange
from quartet.contract.status import Role, ServiceStatus
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.run_directory.checkpoints import Checkpoint
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.recovery import (
    TRANSIENT_ERRORS,
    Recovery,
    RecoveryAttempts,
    RecoveryPoint,
)
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule

PERMANENT = (
    errors.ConfigError,
    errors.DataError,
    errors.ModelError,
    errors.MismatchError,
    errors.AccessRefused,
    errors.OutOfMemory,
    errors.StorageFailed,
    errors.ComputationFailed,
    errors.InvalidRequest,
    errors.TooManyEqualGroups,
    errors.TooManyFailedTrajectories,
)
RUN, CHECKPOINT, COMMITTED = "run", 2, 4


def test_permanent_errors_are_not_retried() -> None:
    assert [kind.__name__ for kind in PERMANENT if issubclass(kind, TRANSIENT_ERRORS)] == []


def test_attempts_end_after_the_configured_number_without_progress() -> None:
    attempts = RecoveryAttempts(RecoveryConfig(max_recoveries=2, backoff_seconds=0.01))
    lost = errors.ServiceUnavailable("gone")
    for step in (1, 2):
        attempts.pause_after(lost)
        attempts.pause_after(lost)
        attempts.record_commit(step)
    attempts.pause_after(lost)
    attempts.pause_after(lost)
    with pytest.raises(errors.ServiceUnavailable) as raised:
        attempts.pause_after(lost)
    assert str(raised.value) == (
        "gave up after 2 recoveries in a row without a further step, the limit of recovery.max_recoveries; fix the cause and "
        "continue with --resume, or raise the limit; the last failure: gone"
    )


def test_with_no_recoveries_the_first_failure_is_raised_as_it_is() -> None:
    lost = errors.ServiceUnavailable("critic at 127.0.0.1:1: gone")
    with pytest.raises(errors.ServiceUnavailable) as raised:
        RecoveryAttempts(RecoveryConfig(max_recoveries=0)).pause_after(lost)
    assert raised.value is lost


class Buffer:
    """The steps whose experience is sealed, and those whose experience is damaged."""

    def __init__(self, steps: Iterable[int], damaged: Iterable[int] = ()) -> None:
        self.steps, self.damaged = set(steps), set(damaged)

    def holds(self, steps: Iterable[int]) -> bool:
        return set(steps) <= self.steps

    def discard(self, steps: Iterable[int]) -> None:
        self.steps -= set(steps)


class _Model:
    """A model whose weights are the updates that it has taken. A call that a real service refuses fails the test."""

    role: Role

    def __init__(self, buffer: Buffer, step: int, run: str = RUN, broken: bool = False, kept: int = 0) -> None:
        """``kept``: number of older policy versions that an actor can still send."""
        self._buffer, self._kept = buffer, kept
        self.weights = [update_of(self.role, each) if run == RUN else (run, each) for each in range(1, step + 1)]
        self.published = dict.fromkeys(range(max(0, step - kept), step + 1), b"")
        self.status = ServiceStatus(
            self.role,
            run=run if step else "",
            step=step,
            policy_version=step,
            broken=broken,
            published_weights=self.published,
        )
        self.restored: list[str] = []
        self.updated: list[int] = []

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> Future[int]:
        assert (run, leader_epoch) == (RUN, 7)
        assert directory == (f"checkpoints/step-{step:06d}/{self.role}" if step else "")
        self.restored.append(directory)
        self.weights = [update_of(self.role, each) for each in range(1, step + 1)]
        self.published = {step: b""}
        return ended(step)

    def update(self, run: str, step: int, leader_epoch: int, settings: Any, loss: Any) -> Future[None]:
        assert (run, step, leader_epoch) == (RUN, len(self.weights) + 1, 7)
        assert step in self._buffer.steps, f"step {step} is not in the buffer"
        if step in self._buffer.damaged:
            return ended(errors.BufferFailed("damaged"))
        rest = (loss.kl_loss_coefficient, loss.entropy_coefficient) if self.role is Role.ACTOR else ()
        self.weights.append((self.role, step, settings.learning_rate, settings.micro_batch_tokens, *rest))
        self.updated.append(step)
        self.published[step] = b""
        return ended(None)


class Actor(_Model, ActorClient):  # type: ignore[misc]
    """The policy."""


class Critic(_Model, CriticClient):  # type: ignore[misc]
    """The value model."""


def ended(result: Any) -> Future[Any]:
    call: Future[Any] = Future()
    call.set_exception(result) if isinstance(result, Exception) else call.set_result(result)
    return call


def recorded(step: int) -> dict[str, float]:
    """Return the metrics of a committed step. The rates and coefficients are those of no schedule."""
    return {
        "step": step,
        "kl_mean": 0.1,
        "kl_coefficient": 0.01 * step,
        "entropy_coefficient": 0.001 * step,
        "learning_rate_actor": 0.1 + step,
        "learning_rate_critic": 0.2 + step,
    }


def update_of(role: Role, step: int) -> tuple[Any, ...]:
    """Return the update of a step as the first attempt took it."""
    line = recorded(step)
    rest = (line["kl_coefficient"], line["entropy_coefficient"]) if role is Role.ACTOR else ()
    return (role, step, line[f"learning_rate_{role}"], {Role.ACTOR: 64, Role.CRITIC: 32}[role], *rest)


def config_of(folder: Path, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": RUN, "directory": str(folder), "steps": 9},
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "algorithm": {"kl_loss": "k3", "score": {"normalize": "running"}},
        "rollout": {"prompts_per_step": 2},
        "checkpoint": {"every_steps": CHECKPOINT},
    }
    return parse_config({**tree, **sections}, "test")


class Interrupted:
    """A run that failed after step ``COMMITTED``, with a checkpoint of step ``CHECKPOINT`` unless it has none."""

    def __init__(self, folder: Path, has_checkpoint: bool = True, **sections: Any) -> None:
        self.config, self.files = config_of(folder, **sections), RunFiles(folder / RUN)
        self.files.trajectories.mkdir(parents=True, exist_ok=True)
        self.files.metrics.write_text("".join(json.dumps(recorded(step)) + "\n" for step in range(1, COMMITTED + 1)))
        for step in range(1, COMMITTED + 2):
            self.files.write_trajectories(step, [{"score": float(step)}, {"score": 0.5}])
        self.checkpoint: Checkpoint | None = None
        if has_checkpoint:
            state = AlgorithmState(self.config)
            for step in range(1, CHECKPOINT + 1):
                state.replay(recorded(step), [float(step), 0.5])
            path = self.files.checkpoints / f"step-{CHECKPOINT:06d}"
            self.checkpoint = Checkpoint(RUN, CHECKPOINT, path, 1, state.state(), ("actor", "critic"), {})
        self.verified: list[bool] = []
        self.state = AlgorithmState(self.config)

    def recover(self, buffer: Buffer, *models: _Model, pending: int | None = None, own: bool = True) -> RecoveryPoint:
        identity = Identity("id", {}, "", {"actor": 64, "critic": 32})
        clients = SimpleNamespace(trained=models)
        run: Any = SimpleNamespace(config=self.config, files=self.files, clients=clients, experience=buffer)
        recovery = Recovery(run, 7, identity, [model.role for model in models] if own else [])

        def newest(verify: bool) -> Checkpoint | None:
            self.verified.append(verify)
            return self.checkpoint

        statuses = {model.role: model.status for model in models}
        return recovery.to_last_commit(newest, statuses, self.state, pending)


def weights_after(role: Role, step: int) -> list[Any]:
    return [update_of(role, each) for each in range(1, step + 1)]


STEPS = [0, 1, 2, 4, 5]


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["checkpoint", "no checkpoint"])
@pytest.mark.parametrize("pending", [None, COMMITTED + 1])
@pytest.mark.parametrize("lost", [set(), {3}, {4}, {1, 2, 3, 4, 5}], ids=str)
def test_models_at_any_step_come_to_the_same_one_by_the_same_updates(
    lost: set[int], pending: int | None, has_checkpoint: bool, tmp_path: Path
) -> None:
    """Each model is new or at any step. Without a pending step, a model that has taken step 5 has taken it of a former leader."""
    base = CHECKPOINT if has_checkpoint else 0
    newest = pending or COMMITTED
    for starts in itertools.product(STEPS, STEPS):
        run, buffer = Interrupted(tmp_path, has_checkpoint), Buffer(set(range(base + 1, COMMITTED + 2)) - lost)
        models = Actor(buffer, starts[0]), Critic(buffer, starts[1])
        point = run.recover(buffer, *models, pending=pending)

        def stays(start: int, limit: int) -> bool:
            # A new model stays only if there is no checkpoint.
            return base <= start <= limit and (start > 0 or base == 0)

        first = min(start if stays(start, newest) else base for start in starts)
        complete = buffer.holds(range(first + 1, COMMITTED + 1))
        # The last commit, or as far as the buffer holds all experience after the checkpoint.
        step = COMMITTED if complete else next(each for each in itertools.count(base) if each + 1 not in buffer.steps)
        assert point == RecoveryPoint(step, base, COMMITTED, buffer.holds(range(base + 1, step + 1))), starts
        for model, start in zip(models, starts, strict=True):
            stayed = stays(start, newest if complete else step)
            assert bool(model.restored or (base == 0 and not stayed)) == (not stayed), starts
            assert model.updated == [*range((start if stayed else base) + 1, step + 1)], starts
            assert model.weights == weights_after(model.role, max(start, step) if stayed else step), starts
        assert len(run.files.read_committed()) == run.state.step == step, starts
        assert run.files.trajectory_steps() == list(range(1, step + 1)), starts
        # A checkpoint is read once more, with its checksums, only if a model needs it.
        limit = newest if complete else step
        assert run.verified == ([False] if all(stays(start, limit) for start in starts) else [False, True]), starts


def test_the_state_of_the_algorithm_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path), Buffer([3, 4])
    run.recover(buffer, Actor(buffer, 4), Critic(buffer, 4))
    expected = AlgorithmState(run.config)
    for step in range(1, COMMITTED + 1):
        expected.replay(recorded(step), [float(step), 0.5])
    assert run.state.state() == expected.state()
    assert run.state.coefficients["kl_coefficient"] == 0.01 * COMMITTED


@pytest.mark.parametrize("behind", [1, 2])
def test_an_actor_can_send_every_version_that_generates_the_next_steps(behind: int, tmp_path: Path) -> None:
    """Off-policy, the actor has kept older versions, or the replay publishes them again."""
    sections: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "max_off_policy_steps": behind},
        "checkpoint": {"every_steps": 3},
    }
    schedule = OffPolicySchedule.of(config_of(tmp_path, **sections))
    for start, pending, kept in itertools.product(STEPS, (None, COMMITTED + 1), range(behind + 1)):
        run, buffer = Interrupted(tmp_path, has_checkpoint=False, **sections), Buffer(range(1, COMMITTED + 2))
        actor = Actor(buffer, start, kept=kept)
        point = run.recover(buffer, actor, pending=pending)
        taken = len(actor.weights)
        assert taken == (pending if pending and start == pending and not actor.restored else COMMITTED)
        assert actor.weights == weights_after(Role.ACTOR, taken)
        # A pending step has its trajectories already.
        needed = range(schedule.policy_version((pending or point.step) + 1, 0), taken + 1)
        assert set(needed) <= actor.published.keys(), (start, pending, kept)


@pytest.mark.parametrize("kept", [0, 1])
def test_an_actor_can_send_the_version_whose_evaluation_has_not_ended(kept: int, tmp_path: Path) -> None:
    """The actor has taken the update after it, beside the evaluation."""
    sections: dict[str, Any] = {
        "data": {"prompts": "p", "validation": "v"},
        "rollout": {"prompts_per_step": 2, "generators": 2},
        "evaluation": {"every_steps": 1, "generators": 1},
    }
    run, buffer = Interrupted(tmp_path, has_checkpoint=False, **sections), Buffer(range(1, COMMITTED + 2))
    actor = Actor(buffer, COMMITTED + 1, kept=kept)
    run.recover(buffer, actor, pending=COMMITTED + 1)
    assert COMMITTED in actor.published
    assert bool(actor.restored) == (kept == 0)


@pytest.mark.parametrize(
    ("start", "own"),
    [({"broken": True}, True), ({"run": "other"}, True), ({}, False)],
    ids=["broken", "of another run", "of an earlier run of this name"],
)
@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC])
def test_a_model_that_cannot_be_trusted_is_restored(
    role: Role, start: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    """An update was interrupted, or the service has trained for another run."""
    run, buffer = Interrupted(tmp_path), Buffer([3, 4])
    model = (Actor if role is Role.ACTOR else Critic)(buffer, COMMITTED, **start)
    point = run.recover(buffer, model, own=own)
    assert (model.restored, model.updated, point.step) == ([f"checkpoints/step-000002/{role}"], [3, 4], 4)
    assert model.weights == weights_after(role, COMMITTED)


def test_a_damaged_experience_counts_as_lost_in_the_next_attempt(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path), Buffer([3, 4], damaged=[4])
    actor = Actor(buffer, 0)
    with pytest.raises(errors.BufferFailed):
        run.recover(buffer, actor)
    assert buffer.steps == {3}
    actor.status = dataclasses.replace(
        actor.status, run=RUN, step=3, policy_version=3, published_weights=actor.published
    )
    point = run.recover(buffer, actor)
    assert (point.step, point.committed, actor.updated) == (3, 4, [3])
    assert point.notes() == [
        "steps 4 to 4 are recomputed from the checkpoint of step 2: the buffer has lost their experience",
        "resumed after step 3",
    ]


def test_a_replayed_step_has_the_live_settings_that_no_metric_records(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path, has_checkpoint=False), Buffer(range(1, COMMITTED + 1))
    lines = [
        {name: line[name] for name in line if name != "entropy_coefficient"} for line in map(recorded, range(1, 5))
    ]
    run.files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, value in ((2, 0.5), (4, 0.25)):
        change = SettingChange("entropy_coefficient", 0.0, value, step, "me", float(step))
        run.files.append_changes([dataclasses.asdict(change)])
    actor = Actor(buffer, 0)
    run.recover(buffer, actor)
    assert [update[-1] for update in actor.weights] == [0.0, 0.5, 0.5, 0.25]


def test_without_a_checkpoint_the_steps_are_recomputed_from_the_start(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path, has_checkpoint=False), Buffer([])
    point = run.recover(buffer, Actor(buffer, 0))
    assert point.notes() == [
        "steps 1 to 4 are recomputed from the start, because there is no usable checkpoint: the buffer has lost their experience"
    ]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path, has_checkpoint=False), Buffer([])
    (run.files.checkpoints / "step-000002").mkdir(parents=True)
    with pytest.raises(errors.ConfigError, match="none of its 1 checkpoints can be used, and the buffer has lost"):
        run.recover(buffer, Actor(buffer, 0))
    assert len(run.files.read_committed()) == COMMITTED
    # With its experience, it needs no checkpoint.
    complete = Buffer(range(1, COMMITTED + 1))
    assert run.recover(complete, Actor(complete, 0)).step == COMMITTED


@pytest.mark.parametrize("change", [lambda text: "", lambda text: text.splitlines(keepends=True)[0]])
def test_metrics_that_end_before_the_checkpoint_are_an_error(change: Callable[[str], str], tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path), Buffer([])
    run.files.metrics.write_text(change(run.files.metrics.read_text()))
    with pytest.raises(errors.ConfigError, match=r"end at step [01], the newest checkpoint is of step 2; put the file"):
        run.recover(buffer, Actor(buffer, 0))


def test_a_truncated_trajectories_file_is_an_error(tmp_path: Path) -> None:
    run, buffer = Interrupted(tmp_path), Buffer([3, 4])
    run.files.write_trajectories(3, [{"score": 3.0}])
    with pytest.raises(
        errors.ConfigError, match=r"trajectories .*step-000003\.jsonl: has 1 lines, expected the step's 2"
    ):
        run.recover(buffer, Actor(buffer, 0))
