"""One step as a transaction: prepare, seal, update, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from quartet.data import PromptOrder
from quartet.errors import TooManyFailedTrajectories
from quartet.failpoints import failpoint
from quartet.services.orchestrator.algorithm.updates import Updates
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import Saving
from quartet.services.orchestrator.checkpointing.recovery import Attempts
from quartet.services.orchestrator.checkpointing.step_artifacts import StepRecord, update_metrics
from quartet.services.orchestrator.checkpointing.step_committer import StepCommitter
from quartet.services.orchestrator.leadership import Leadership
from quartet.services.orchestrator.rollout.collector import wait_for_all
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.services.orchestrator.rollout.preparation import Preparation, SealedStep
from quartet.telemetry.traces import StepTraces
from quartet.types import Alert, Role, UpdateResult


class StepTransaction:
    """Takes steps, one at a time. Until a step is committed, nothing that the next one builds on has changed.

    Once it is prepared it stays in hand: it is as good as applied, whatever happens to the services.
    """

    def __init__(
        self,
        order: PromptOrder,
        off_policy: OffPolicySchedule,
        preparation: Preparation,
        updates: Updates,
        ledger: StepCommitter,
        saving: Saving,
        attempts: Attempts,
        traces: StepTraces,
    ) -> None:
        """``saving`` finishes the checkpoint that is under way before the models change; ``attempts`` hear of every commit."""
        self._order, self._off_policy, self._preparation = order, off_policy, preparation
        self._updates, self._committer, self._saving = updates, ledger, saving
        self._attempts, self._traces = attempts, traces
        self._sealed: SealedStep | None = None

    @property
    def pending_step(self) -> int | None:
        """The step that is prepared and not committed."""
        return self._sealed.step if self._sealed else None

    def discard(self) -> None:
        """Forgets the step in hand: the run goes another way."""
        self._sealed = None

    def policy_version(self, step: int) -> int:
        """Updates that the policy which generates ``step`` has taken."""
        return self._off_policy.policy_version(step, self._saving.newest_step)

    def begin_ahead(self, step: int, leadership: Leadership) -> None:
        """Begins the generation of ``step`` while the one before it is brought to its end."""
        self._preparation.begin(step, self._order.of_step(step), leadership.epoch, self.policy_version(step))

    def take(self, step: int, leadership: Leadership, goes_straight_on: Callable[[int], bool]) -> list[Alert]:
        """Takes one step, or takes it to its end where it is in hand. Gives what the guards find in it.

        ``goes_straight_on`` says whether nothing is to be done between this step and the next one.
        """
        started = time.perf_counter()
        if self._sealed is None or self._sealed.step != step:
            self._sealed = self._prepare(step, leadership)
        sealed = self._sealed
        self._committer.seal(sealed)
        self._saving.finish(leadership)
        if self.policy_version(step + 1) < step:
            # Before the update begins: from then on the policy is on its way to another.
            self.begin_ahead(step + 1, leadership)
        updating = time.perf_counter()
        with self._traces.part("update"):
            updates, record = self._update(step, leadership, sealed, goes_straight_on)
        failpoint("orchestrator.updated")
        ended = time.perf_counter()
        metrics = {
            **self._figures(step, sealed, record, updates),
            "seconds": ended - started,
            "generate_seconds": sealed.collected.generate_seconds,
            "score_seconds": sealed.collected.score_seconds,
            "update_seconds": ended - updating,
        }
        if "entropy" in metrics:
            metrics["entropy_slope"] = leadership.algorithm_state.entropy_slope(metrics["entropy"])
        self._commit(step, leadership, sealed, record, metrics)
        self._committer.tell(step, metrics, started)
        self._sealed = None
        return leadership.algorithm_state.commit(metrics, [item.score for item in sealed.collected.scored])

    def _prepare(self, step: int, leadership: Leadership) -> SealedStep:
        version, prompts = self.policy_version(step), self._order.of_step(step)
        try:
            with self._traces.part("prepare"):
                return self._preparation.prepare(step, prompts, leadership.epoch, version, leadership.algorithm_state)
        except TooManyFailedTrajectories as error:
            self._committer.failed_trajectories(step, error.failed_trajectories)
            raise

    def _update(
        self, step: int, leadership: Leadership, sealed: SealedStep, goes_straight_on: Callable[[int], bool]
    ) -> tuple[dict[Role, UpdateResult], StepRecord]:
        """What the models say of their updates; and, made while they learn, the record of what they learn from."""
        calls = self._updates.begin(step, leadership.epoch)
        record = self._committer.record(sealed)

        def go_ahead() -> None:
            # The policy is as the next step wants it, whatever the critic still does.
            if calls[Role.ACTOR].done() and goes_straight_on(step):
                self.begin_ahead(step + 1, leadership)

        wait_for_all(list(calls.values()), go_ahead)
        return {role: call.result() for role, call in calls.items()}, record

    def _commit(
        self, step: int, leadership: Leadership, sealed: SealedStep, record: StepRecord, metrics: dict[str, float]
    ) -> None:
        leadership.check()
        self._committer.write(step, sealed, record, metrics)
        self._attempts.progressed(step)
        self._committer.settle(step, sealed, metrics)

    def _figures(
        self, step: int, sealed: SealedStep, record: StepRecord, updates: Mapping[Role, UpdateResult]
    ) -> dict[str, float]:
        prepared = sealed.prepared
        off_policy = {"staleness": step - 1 - prepared.experience.policy_version} if self._off_policy.most else {}
        rates = {f"learning_rate_{role}": rate for role, rate in self._updates.learning_rates(step).items()}
        return {
            "step": step,
            **prepared.metrics,
            **record.figures,
            "failed_trajectories": len(sealed.collected.failed_trajectories),
            **off_policy,
            **update_metrics(updates),
            **rates,
        }
