"""The way back to the last committed step: checkpoint, then replay of the sealed experience; or regeneration where it is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from quartet.buffer.experience_store import ExperienceStore
from quartet.config import Config, RecoveryConfig
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
from quartet.run_directory.checkpoints import Checkpoint
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.algorithm.update_request import begin_update
from quartet.services.orchestrator.rollout.collector import wait_for_all
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.services.orchestrator.service_clients import ServiceClients, Statuses
from quartet.types import Role, ServiceStatus

log = structlog.get_logger()


RECOVERABLE = (ServiceUnavailable, ServiceFailed, ServiceBusy, BufferFailed, FailedPrecondition)
"""What a service or a buffer that went away, came back or broke down makes a call fail with. Anything else fails again."""


class Attempts:
    """How often a run has failed without getting any further."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._failures = self._furthest = 0

    def progressed(self, step: int) -> None:
        """A step was committed: one that was not before lets the count begin anew."""
        if step > self._furthest:
            self._furthest, self._failures = step, 0

    def go_back(self, step: int) -> None:
        """The run begins again after ``step``, as a user asked for: what it takes from there on is progress."""
        self._furthest, self._failures = step, 0

    def pause_after(self, error: QuartetError) -> float:
        """Seconds to wait before the next attempt. Raises ``error``, with how often it was tried, when there is to be none."""
        if self._failures == self._config.max_recoveries:
            if not self._failures:
                raise error
            raise type(error)(
                f"gave up after {self._failures} recoveries in a row without a further step; the last failure: {error}"
            ) from error
        self._failures += 1
        return self._config.pause(self._failures)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a run goes on: after ``step``. ``checkpoint`` is the newest one's step, 0 without one.

    ``committed``: the last step that was committed; where ``step`` is before it, what leads there is lost, and it comes again.
    ``covered``: whether the run could come here again if it lost a model now.
    """

    step: int
    checkpoint: int
    committed: int
    covered: bool

    def notes(self) -> list[str]:
        """What a user should know of it."""
        notes = []
        if self.step < self.committed:
            notes.append(
                f"steps {self.step + 1} to {self.committed} are taken again: the buffer has lost what leads there from "
                + (
                    f"the checkpoint of step {self.checkpoint}"
                    if self.checkpoint
                    else "the start, and there is no checkpoint"
                )
            )
        if self.step:
            notes.append(f"going on after step {self.step}")
        return notes


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to get to ``step``: where each model goes on from, None for one that is to be restored from ``checkpoint``.

    ``policy``: the step to which the actor is brought.
    """

    checkpoint: Checkpoint | None
    step: int
    places: dict[Role, int | None]
    policy: int

    @property
    def base(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


class Recovery:
    """Brings models, optimizers and the algorithm's own state to the same step."""

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        service_clients: ServiceClients,
        experience: ExperienceStore,
        leader_epoch: int,
        identity: Identity,
        trusted: Callable[[ServiceStatus], bool] = lambda _: True,
    ) -> None:
        """``trusted`` says whether what a model has learned is surely of this run, not of one that has its name."""
        self._config, self._files, self._service_clients = config, files, service_clients
        self._experience, self._epoch, self._identity, self._trusted = experience, leader_epoch, identity, trusted
        self._off_policy = OffPolicySchedule.of(config)

    def to_last_commit(
        self,
        newest: Callable[[bool], Checkpoint | None],
        statuses: Statuses,
        algorithm_state: AlgorithmState,
        sealed: int | None = None,
    ) -> Recovered:
        """Goes to the last committed step, or, where the buffer has lost what a model needs to get there, as far as it has not.

        What came after that step is forgotten: the same seeds bring the same again. A model that has applied ``sealed``, the step
        that is about to be committed, may stay there. The actor goes no further than to the policy that generates what comes
        next, which may be a step behind; ``replay`` then takes it to the others. ``newest`` gives the newest checkpoint: with
        True one of which every byte was looked at. ``course`` is as before the first step. Raises ConfigError when the run's
        files are damaged.
        """
        history = self._files.committed()
        plan = self._plan(newest(False), statuses, len(history), sealed)
        if None in plan.places.values():
            plan = self._plan(newest(True), statuses, len(history), sealed)
        if plan.step < len(history):
            log.warning("sealed experience is lost; its steps are taken again", first=plan.step + 1, last=len(history))
        self._files.forget_after(plan.step)
        self._recall(algorithm_state, plan, history[: plan.step])
        for client in self._service_clients.trained:
            self._bring(client, plan, history)
        covered = self._experience.holds(range(plan.base + 1, plan.step + 1))
        return Recovered(plan.step, plan.base, len(history), covered)

    def _plan(self, checkpoint: Checkpoint | None, statuses: Statuses, last: int, sealed: int | None) -> _Plan:
        base = checkpoint.step if checkpoint else 0
        if last < base:
            raise ConfigError(
                f"metrics {self._files.metrics}: end at step {last}, the newest checkpoint is of step {base}; put the file back, "
                "or start the run anew"
            )

        def plan(step: int, applied: int) -> _Plan:
            policy = self._off_policy.policy_version(applied + 1, base)
            at_most = {
                client.role: policy if client.role is Role.ACTOR else applied
                for client in self._service_clients.trained
            }
            places = {role: self._place(statuses[role], base, most) for role, most in at_most.items()}
            return _Plan(checkpoint, step, places, min(step, policy))

        found = plan(last, last + 1 if sealed == last + 1 else last)
        starts = [base if place is None else place for place in found.places.values()]
        if self._experience.holds(range(min(starts) + 1, last + 1)):
            return found
        step = base
        while self._experience.holds([step + 1]):
            step += 1
        return plan(step, step)

    def _place(self, status: ServiceStatus, base: int, applied: int) -> int | None:
        """The step at which a model may stay: on the way from the checkpoint's to ``applied``."""
        if status.broken:
            return None
        if status.policy_version == 0:
            return 0 if base == 0 else None
        ours = status.run == self._config.run.name and self._trusted(status)
        return status.step if ours and base <= status.step <= applied else None

    def _recall(self, algorithm_state: AlgorithmState, plan: _Plan, history: list[dict[str, float]]) -> None:
        algorithm_state.restore(plan.base, plan.checkpoint.state if plan.checkpoint else None, history[: plan.base])
        sequences = self._config.rollout.prompts_per_step * self._config.rollout.samples_per_prompt
        for metrics in history[plan.base :]:
            algorithm_state.commit(metrics, self._files.scores(int(metrics["step"]), sequences))

    def _bring(self, client: ActorClient | CriticClient, plan: _Plan, history: list[dict[str, float]]) -> None:
        """One model to the plan's step: as it stands, or from the checkpoint; then the same updates as it took before."""
        step = plan.places[client.role]
        if step is None:
            path = plan.checkpoint.path if plan.checkpoint else None
            directory = f"{path.relative_to(self._files.root).as_posix()}/{client.role}" if path else ""
            wait_for_all([client.restore(self._config.run.name, plan.base, self._epoch, directory)])
            step = plan.base
        self.replay(client, step, plan.policy if client.role is Role.ACTOR else plan.step, history)

    def replay(
        self, client: ActorClient | CriticClient, step: int, to: int, history: Sequence[Mapping[str, float]]
    ) -> None:
        """Takes one model from ``step`` ``to`` a later one by the same updates as it took before."""
        for replay in range(step + 1, to + 1):
            # As it was then: a run that was made longer has another schedule now.
            rate = history[replay - 1].get(f"learning_rate_{client.role}")
            tokens = self._identity.micro_batch_tokens_of(client.role)
            try:
                wait_for_all([begin_update(client, self._config, replay, self._epoch, rate, tokens)])
            except BufferFailed:
                # Damaged is as good as lost: the next attempt takes the steps again.
                self._experience.discard([replay])
                raise
