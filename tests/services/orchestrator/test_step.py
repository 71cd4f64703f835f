"""One step as a transaction: after a failure at any moment it is finished as it was prepared, and committed once."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.config.deployment import RecoveryConfig
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.update import UpdateResult
from quartet.errors import (
    BufferFailed,
    FailedPrecondition,
    QuartetError,
    ServiceFailed,
    ServiceUnavailable,
    TooManyFailedTrajectories,
)
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.recovery import RecoveryAttempts
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.collector import CollectedStep
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.telemetry.step_profiler import CallSeconds, StepProfiler


class Parts:
    """The parts of a step, which record their calls. The next call named ``fails_at`` raises ``failure``."""

    config: Config
    is_running = is_beside_training = False
    """Of the evaluator."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.generations: list[tuple[int, int, list[int]]] = []
        self.committed: list[int] = []
        self.fails_at, self.failure = "", QuartetError("none")
        self.newest_step = 0

    def _call(self, name: str, step: int = 0) -> None:
        self.calls.append(f"{name} {step}" if step else name)
        if self.calls[-1] == self.fails_at:
            self.fails_at = ""
            raise self.failure

    # StepPreparation

    def prepare(self, step: int, rounds: Any, epoch: int, version: int, state: AlgorithmState) -> Any:
        self._call("prepare", step)
        scored: Any = SimpleNamespace(trajectory=None, score=1.0)
        return SimpleNamespace(
            step=step,
            collected=CollectedStep([scored], [], [], 0.0, 0.0),
            prepared=SimpleNamespace(
                experience=SimpleNamespace(policy_version=version), metrics={"kl_mean": 0.1, "kl_coefficient": 0.05}
            ),
            rounds=rounds,
            part_weights={},
        )

    def start_generation(self, step: int, prompts: Any, epoch: int, version: int) -> None:
        self.generations.append((step, version, prompts))

    def policy_updated(self, leader_epoch: int, publication: Any) -> None:
        self._call("published")

    def take_metrics(self, version: int) -> dict[str, float]:
        return {}

    # Utilisation

    def metrics(self, step: int, experience: Any, generated_tokens: int, calls: CallSeconds) -> dict[str, float]:
        return {}

    # What StepTransaction writes to the buffer and the files

    def seal(self, pending: Any) -> None:
        self._call("seal", pending.step)

    def record(self, pending: Any) -> Any:
        return SimpleNamespace(metrics={}, rows=[])

    def commit(self, step: int, pending: Any, record: Any, metrics: dict[str, float]) -> None:
        self._call("commit", step)
        self.committed.append(step)

    def clean_up(self, step: int, pending: Any, metrics: dict[str, float]) -> None:
        self._call("clean up", step)

    def report(self, step: int, metrics: dict[str, float], started: float) -> None:
        self._call("report", step)

    def write_failed_trajectories(self, step: int, failed: Any) -> None:
        self.calls.append(f"failed {step}: {failed}")

    def start_updates(self, step: int, epoch: int, state: AlgorithmState) -> dict[Role, Future[UpdateResult]]:
        calls: dict[Role, Future[UpdateResult]] = {}
        for role in (Role.ACTOR, Role.CRITIC):
            calls[role] = Future()
            try:
                self._call(f"update {role}", step)
                calls[role].set_result(UpdateResult(step, step, {}))
            except QuartetError as error:
                calls[role].set_exception(error)
        return calls

    def config_at(self, step: int, state: AlgorithmState) -> Config:
        return self.config

    def learning_rates(self, step: int) -> dict[Role, float]:
        return {Role.ACTOR: 0.1}

    # CheckpointScheduler and the lease

    def finish(self, check_lease: Any) -> None:
        self._call("finish checkpoint")

    def check(self) -> None:
        self._call("lease")


class Prompts:
    """Two prompts per step, each with its own index."""

    def of_step(self, step: int) -> list[Any]:
        return [SimpleNamespace(index=2 * step - 2), SimpleNamespace(index=2 * step - 1)]


class Transaction:
    """A transaction over ``parts``, and the state of the algorithm."""

    def __init__(self, parts: Parts, folder: Path, **rollout: Any) -> None:
        tree: dict[str, Any] = {
            "run": {"directory": str(folder), "steps": 9},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "rollout": {"prompts_per_step": 2, **rollout},
            "checkpoint": {"every_steps": 4},
        }
        config = parts.config = parse_config(tree, "test")
        any_parts: Any = parts
        self.attempts = RecoveryAttempts(RecoveryConfig(max_recoveries=1, backoff_seconds=0.01))
        devices = SimpleNamespace(metrics=dict)
        board = ProgressBoard("run", 9)
        run: Any = SimpleNamespace(config=config, board=board, profiler=StepProfiler(), devices=devices)
        identity: Any = None
        self.steps = StepTransaction(
            run, identity, None, Prompts(), any_parts, any_parts, self.attempts, any_parts, any_parts
        )
        for name in ("seal", "start_updates", "config_at", "learning_rates", "record", "commit", "clean_up", "report"):
            setattr(self.steps, f"_{name}", getattr(parts, name))
        self.steps._write_failed_trajectories = parts.write_failed_trajectories  # type: ignore[method-assign]
        self.state = AlgorithmState(config)
        self._leadership: Any = SimpleNamespace(epoch=3, algorithm_state=self.state, check=parts.check)

    def take(self, step: int) -> None:
        self.steps.take(step, self._leadership, lambda _: False)


WHOLE = [
    "prepare 1",
    "seal 1",
    "finish checkpoint",
    "update actor 1",
    "update critic 1",
    "published",
    "lease",
    "commit 1",
    "clean up 1",
    "report 1",
]


def test_a_step_is_sealed_before_the_updates_and_committed_after_a_check_of_the_lease(tmp_path: Path) -> None:
    parts = Parts()
    transaction = Transaction(parts, tmp_path)
    transaction.take(1)
    assert parts.calls == WHOLE
    assert (transaction.steps.pending_step, transaction.state.step) == (None, 1)


@pytest.mark.parametrize("moment", WHOLE[1:8])
def test_a_step_that_fails_after_its_preparation_is_finished_without_a_second_generation(
    moment: str, tmp_path: Path
) -> None:
    """A model may have applied it already."""
    parts = Parts()
    parts.fails_at, parts.failure = moment, ServiceUnavailable("gone")
    transaction = Transaction(parts, tmp_path)
    with pytest.raises(ServiceUnavailable):
        transaction.take(1)
    assert (transaction.steps.pending_step, transaction.state.step, parts.committed) == (1, 0, [])
    parts.calls.clear()
    transaction.take(1)
    assert parts.calls == WHOLE[1:]
    assert (transaction.steps.pending_step, transaction.state.step, parts.committed) == (None, 1, [1])


def test_a_committed_step_is_not_taken_again_if_its_clean_up_fails(tmp_path: Path) -> None:
    """The next leader continues after it, and prepares the step after it."""
    parts = Parts()
    parts.fails_at, parts.failure = "clean up 1", BufferFailed("gone")
    transaction = Transaction(parts, tmp_path)
    with pytest.raises(BufferFailed):
        transaction.take(1)
    assert parts.committed == [1]
    parts.calls.clear()
    transaction.take(2)
    assert parts.calls[0] == "prepare 2"
    assert parts.committed == [1, 2]


@pytest.mark.parametrize("error", [ServiceUnavailable("gone"), FailedPrecondition("another version")])
def test_a_step_whose_preparation_fails_is_prepared_again(error: QuartetError, tmp_path: Path) -> None:
    parts = Parts()
    parts.fails_at, parts.failure = "prepare 1", error
    transaction = Transaction(parts, tmp_path)
    with pytest.raises(type(error)):
        transaction.take(1)
    assert transaction.steps.pending_step is None
    parts.calls.clear()
    transaction.take(1)
    assert parts.calls == WHOLE


@pytest.mark.parametrize("kind", [TooManyFailedTrajectories, ServiceFailed])
def test_the_trajectories_that_end_a_run_are_recorded(kind: Any, tmp_path: Path) -> None:
    parts = Parts()
    failed, error = ["the failed ones"], kind("too many")
    error.failed_trajectories = failed
    parts.fails_at, parts.failure = "prepare 1", error
    with pytest.raises(kind):
        Transaction(parts, tmp_path).take(1)
    assert parts.calls[-1] == f"failed 1: {failed}"


def test_a_rollback_drops_the_pending_step(tmp_path: Path) -> None:
    parts = Parts()
    parts.fails_at, parts.failure = "commit 1", ServiceUnavailable("gone")
    transaction = Transaction(parts, tmp_path)
    with pytest.raises(ServiceUnavailable):
        transaction.take(1)
    transaction.steps.discard()
    parts.calls.clear()
    transaction.take(1)
    assert parts.calls == WHOLE


def test_only_a_further_commit_resets_the_number_of_failures(tmp_path: Path) -> None:
    parts = Parts()
    transaction = Transaction(parts, tmp_path)
    for step in (1, 2):
        parts.fails_at, parts.failure = f"update critic {step}", ServiceUnavailable("gone")
        with pytest.raises(ServiceUnavailable) as raised:
            transaction.take(step)
        transaction.attempts.pause_after(raised.value)
        transaction.take(step)
    transaction.attempts.pause_after(ServiceUnavailable("gone"))
    with pytest.raises(ServiceUnavailable, match="gave up after 1 recoveries"):
        transaction.attempts.pause_after(ServiceUnavailable("gone"))


def test_off_policy_steps_are_generated_ahead_with_the_prompts_and_the_version_of_the_schedule(tmp_path: Path) -> None:
    """A repeated step starts the same generations with the same versions."""
    parts = Parts()
    transaction = Transaction(parts, tmp_path, max_off_policy_steps=1)
    parts.fails_at, parts.failure = "update actor 2", ServiceUnavailable("gone")
    transaction.take(1)
    with pytest.raises(ServiceUnavailable):
        transaction.take(2)
    transaction.take(2)
    started = [(step, version, [prompt.index for prompt in prompts]) for step, version, prompts in parts.generations]
    assert started == [(2, 0, [2, 3]), (3, 1, [4, 5]), (3, 1, [4, 5])]
