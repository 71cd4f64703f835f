"""Recovery to the last committed step: restore a checkpoint and replay the sealed experience, or recompute lost steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog

from quartet.config.deployment import RecoveryConfig
from quartet.config.live_settings import with_values
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import (
    BufferFailed,
    ConfigError,
    FailedPrecondition,
    QuartetError,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.run_directory.checkpoints import Checkpoint, checkpoint_folders
from quartet.run_directory.identity import Identity
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.algorithm.update_request import start_update
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.control.live_settings import config_at, read_changes
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.services.orchestrator.service_clients import ServiceStatuses, wait_for_all

log = structlog.get_logger()


TRANSIENT_ERRORS = (ServiceUnavailable, ServiceFailed, ServiceBusy, BufferFailed, FailedPrecondition)
"""Errors of a call to a service or buffer that failed or restarted. Any other error would occur again, so it ends the run."""


class RecoveryAttempts:
    """Number of recoveries since the run's last progress, and the pause before the next one."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._failures = self._furthest_step = 0

    def record_commit(self, step: int) -> None:
        """Record a committed step. A step beyond all earlier ones resets the count."""
        if step > self._furthest_step:
            self._furthest_step, self._failures = step, 0

    def record_rollback(self, step: int) -> None:
        """Record that a user rolled the run back to ``step``: the steps from there on count as progress."""
        self._furthest_step, self._failures = step, 0

    def pause_after(self, error: QuartetError) -> float:
        """Return the seconds to wait before the next attempt. Raises ``error``, with the number of attempts, if none is left."""
        if self._failures == self._config.max_recoveries:
            if not self._failures:
                raise error
            raise type(error)(
                f"gave up after {self._failures} recoveries in a row without a further step, the limit of "
                "recovery.max_recoveries; fix the cause and continue with --resume, or raise the limit; the last failure: "
                f"{error}"
            ) from error
        self._failures += 1
        return self._config.pause(self._failures)


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """Point from which a run continues: after ``step``. ``checkpoint`` is the step of the newest checkpoint, 0 without one.

    ``committed`` is the last committed step. If ``step`` is before it, the experience in between is lost, and the steps are
    recomputed. ``replayable``: whether the buffer still holds all experience between checkpoint and ``step``.
    """

    step: int
    checkpoint: int
    committed: int
    replayable: bool

    def notes(self) -> list[str]:
        """Return notes for the user."""
        notes = []
        if self.step < self.committed:
            base = (
                f"the checkpoint of step {self.checkpoint}"
                if self.checkpoint
                else "the start, because there is no usable checkpoint"
            )
            notes.append(
                f"steps {self.step + 1} to {self.committed} are recomputed from {base}: the buffer has lost their experience"
            )
        if self.step:
            notes.append(f"resumed after step {self.step}")
        return notes


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan to reach ``step``. ``start_steps``: the step at which each model starts; None restores it from ``checkpoint``."""

    checkpoint: Checkpoint | None
    step: int
    start_steps: dict[Role, int | None]

    @property
    def checkpoint_step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


class Recovery:
    """Recovery of models, optimizers and the algorithm's state to the same step."""

    def __init__(
        self,
        run: RunContext,
        leader_epoch: int,
        identity: Identity,
        own_models: Collection[Role] = tuple(Role),
    ) -> None:
        """``own_models``: roles whose model is known to be trained by this run, not by another run of the same name."""
        self._config, self._files, self._clients, self._experience = run.config, run.files, run.clients, run.experience
        self._epoch, self._identity, self._own_models = leader_epoch, identity, own_models
        self._off_policy = OffPolicySchedule.of(run.config)

    def to_last_commit(
        self,
        newest_checkpoint: Callable[[bool], Checkpoint | None],
        statuses: ServiceStatuses,
        algorithm_state: AlgorithmState,
        pending_step: int | None = None,
    ) -> RecoveryPoint:
        """Go to the last committed step, or as far as the buffer still holds the experience that a model needs.

        Artifacts of later steps are dropped: the same seeds produce them again. A model that has already applied
        ``pending_step``, which is sealed but not committed, keeps it. Afterwards the actor can send every policy version that
        generates the next steps: the replay publishes those that it has not kept. ``newest_checkpoint`` returns the newest
        checkpoint, with verified checksums if its argument is True. ``algorithm_state`` is that before the first step. Raises
        ConfigError if the run's files are damaged.
        """
        history = self._files.read_committed()
        plan = self._plan(newest_checkpoint(False), statuses, len(history), pending_step)
        if None in plan.start_steps.values():
            plan = self._plan(newest_checkpoint(True), statuses, len(history), pending_step)
        if plan.step < len(history):
            if plan.checkpoint is None and (damaged := checkpoint_folders(self._files)):
                raise ConfigError(
                    f"run {self._files.root}: none of its {len(damaged)} checkpoints can be used, and the buffer has lost the "
                    f"experience after step {plan.step}, so its steps would be computed again; restore it from a backup "
                    f"(quartet checkpoints verify {self._files.root} names what is damaged), or begin again: quartet train "
                    "CONFIG --overwrite"
                )
            log.warning("sealed experience lost", first_step=plan.step + 1, last_step=len(history))
        self._files.truncate_after(plan.step)
        self._restore_algorithm_state(algorithm_state, plan, history[: plan.step])
        for client in self._clients.trained:
            self._restore_model(client, plan, history)
        replayable = self._experience.holds(range(plan.checkpoint_step + 1, plan.step + 1))
        return RecoveryPoint(plan.step, plan.checkpoint_step, len(history), replayable)

    def _plan(
        self, checkpoint: Checkpoint | None, statuses: ServiceStatuses, last: int, pending_step: int | None
    ) -> _Plan:
        base = checkpoint.step if checkpoint else 0
        if last < base:
            raise ConfigError(
                f"metrics {self._files.metrics}: end at step {last}, the newest checkpoint is of step {base}; put the file back, "
                "or start a new run"
            )

        def plan(step: int, applied: int) -> _Plan:
            oldest = self._off_policy.policy_version(applied + 1, base)
            if self._config.evaluation.generators:
                # The evaluation of the last committed step may not have ended, although the actor has taken the next update.
                oldest = min(oldest, step)
            start_steps = {
                client.role: self._start_step(client.role, statuses[client.role], base, applied, oldest)
                for client in self._clients.trained
            }
            return _Plan(checkpoint, step, start_steps)

        full_plan = plan(last, last + 1 if pending_step == last + 1 else last)
        starts = [base if step is None else step for step in full_plan.start_steps.values()]
        if self._experience.holds(range(min(starts) + 1, last + 1)):
            return full_plan
        step = base
        while self._experience.holds([step + 1]):
            step += 1
        return plan(step, step)

    def _start_step(self, role: Role, status: ServiceStatus, base: int, max_step: int, oldest: int) -> int | None:
        """Return the step at which a model may stay, between the checkpoint's and ``max_step``; None if it must be restored.

        ``oldest``: the oldest policy version that the actor must be able to send.
        """
        if status.broken:
            return None
        if role is Role.ACTOR and not set(range(oldest, status.step)) <= status.published_weights.keys():
            return None
        if status.policy_version == 0:
            return 0 if base == 0 else None
        is_own = status.run == self._config.run.name and role in self._own_models
        return status.step if is_own and base <= status.step <= max_step else None

    def _restore_algorithm_state(
        self, algorithm_state: AlgorithmState, plan: _Plan, history: list[dict[str, float]]
    ) -> None:
        base = plan.checkpoint_step
        algorithm_state.restore(base, plan.checkpoint.state if plan.checkpoint else None, history[:base])
        sequences = self._config.rollout.prompts_per_step * self._config.rollout.samples_per_prompt
        for metrics in history[base:]:
            algorithm_state.replay(metrics, self._files.read_scores(int(metrics["step"]), sequences))

    def _restore_model(self, client: ActorClient | CriticClient, plan: _Plan, history: list[dict[str, float]]) -> None:
        """Bring one model to the plan's step: from its current state or from the checkpoint, then repeat its updates."""
        step = plan.start_steps[client.role]
        if step is None:
            path = plan.checkpoint.path if plan.checkpoint else None
            directory = f"{path.relative_to(self._files.root).as_posix()}/{client.role}" if path else ""
            wait_for_all([client.restore(self._config.run.name, plan.checkpoint_step, self._epoch, directory)])
            step = plan.checkpoint_step
        self.replay(client, step, plan.step, history)

    def replay(
        self, client: ActorClient | CriticClient, step: int, to: int, history: Sequence[Mapping[str, float]]
    ) -> None:
        """Bring one model from ``step`` forward ``to`` a later step, by the same updates as before."""
        changes = read_changes(self._files)
        for replayed in range(step + 1, to + 1):
            # The recorded rate: the schedule differs if the run has been extended since.
            rate = history[replayed - 1].get(f"learning_rate_{client.role}")
            # What controllers held is among the metrics, by the same names.
            config = with_values(config_at(self._config, changes, replayed), history[replayed - 1])
            tokens = self._identity.micro_batch_tokens_of(client.role)
            try:
                wait_for_all([start_update(client, config, replayed, self._epoch, rate, tokens)])
            except BufferFailed:
                # Damaged experience counts as lost: the next attempt recomputes its step.
                self._experience.discard([replayed])
                raise
