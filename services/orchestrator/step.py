"""One step as a transaction: prepare, seal, update, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from quartet.data import PromptOrder
from quartet.errors import TooManySetAside
from quartet.failpoints import failpoint
from quartet.telemetry.traces import StepTraces
from quartet.types import Alert, Role, UpdateResult
from services.orchestrator.collector import wait_for_all
from services.orchestrator.lead import Lead
from services.orchestrator.ledger import Ledger
from services.orchestrator.preparation import Preparation, SealedStep
from services.orchestrator.records import StepRecord, update_metrics
from services.orchestrator.recovery import Attempts
from services.orchestrator.saving import Saving
from services.orchestrator.staleness import Staleness
from services.orchestrator.updates import Updates


class StepTransaction:
    """Takes steps, one at a time. Until a step is committed, nothing that the next one builds on has changed.

    Once it is prepared it stays in hand: it is as good as applied, whatever happens to the services.
    """

    def __init__(
        self,
        order: PromptOrder,
        staleness: Staleness,
        preparation: Preparation,
        updates: Updates,
        ledger: Ledger,
        saving: Saving,
        attempts: Attempts,
        traces: StepTraces,
    ) -> None:
        """``saving`` finishes the checkpoint that is under way before the models change; ``attempts`` hear of every commit."""
        self._order, self._staleness, self._preparation = order, staleness, preparation
        self._updates, self._ledger, self._saving = updates, ledger, saving
        self._attempts, self._traces = attempts, traces
        self._sealed: SealedStep | None = None

    @property
    def in_hand(self) -> int | None:
        """The step that is prepared and not committed."""
        return self._sealed.step if self._sealed else None

    def let_go(self) -> None:
        """Forgets the step in hand: the run goes another way."""
        self._sealed = None

    def policy_version(self, step: int) -> int:
        """Updates that the policy which generates ``step`` has taken."""
        return self._staleness.policy_version(step, self._saving.newest_step)

    def begin_ahead(self, step: int, lead: Lead) -> None:
        """Begins the generation of ``step`` while the one before it is brought to its end."""
        self._preparation.begin(step, self._order.of_step(step), lead.epoch, self.policy_version(step))

    def take(self, step: int, lead: Lead, goes_straight_on: Callable[[int], bool]) -> list[Alert]:
        """Takes one step, or takes it to its end where it is in hand. Gives what the guards find in it.

        ``goes_straight_on`` says whether nothing is to be done between this step and the next one.
        """
        started = time.perf_counter()
        if self._sealed is None or self._sealed.step != step:
            self._sealed = self._prepare(step, lead)
        sealed = self._sealed
        self._ledger.seal(sealed)
        self._saving.finish(lead)
        if self.policy_version(step + 1) < step:
            # Before the update begins: from then on the policy is on its way to another.
            self.begin_ahead(step + 1, lead)
        updating = time.perf_counter()
        with self._traces.part("update"):
            updates, record = self._update(step, lead, sealed, goes_straight_on)
        failpoint("orchestrator.updated")
        ended = time.perf_counter()
        metrics = {
            **self._figures(step, sealed, record, updates),
            "seconds": ended - started,
            "seconds_generate": sealed.collected.seconds_generate,
            "seconds_score": sealed.collected.seconds_score,
            "seconds_update": ended - updating,
        }
        if "entropy" in metrics:
            metrics["entropy_slope"] = lead.course.entropy_slope(metrics["entropy"])
        self._commit(step, lead, sealed, record, metrics)
        self._ledger.tell(step, metrics, started)
        self._sealed = None
        return lead.course.commit(metrics, [item.score for item in sealed.collected.scored])

    def _prepare(self, step: int, lead: Lead) -> SealedStep:
        version, prompts = self.policy_version(step), self._order.of_step(step)
        try:
            with self._traces.part("prepare"):
                return self._preparation.prepare(step, prompts, lead.epoch, version, lead.course)
        except TooManySetAside as error:
            self._ledger.set_aside(step, error.set_aside)
            raise

    def _update(
        self, step: int, lead: Lead, sealed: SealedStep, goes_straight_on: Callable[[int], bool]
    ) -> tuple[dict[Role, UpdateResult], StepRecord]:
        """What the models say of their updates; and, made while they learn, the record of what they learn from."""
        calls = self._updates.begin(step, lead.epoch)
        record = self._ledger.record(sealed)

        def go_ahead() -> None:
            # The policy is as the next step wants it, whatever the critic still does.
            if calls[Role.ACTOR].done() and goes_straight_on(step):
                self.begin_ahead(step + 1, lead)

        wait_for_all(list(calls.values()), go_ahead)
        return {role: call.result() for role, call in calls.items()}, record

    def _commit(self, step: int, lead: Lead, sealed: SealedStep, record: StepRecord, metrics: dict[str, float]) -> None:
        lead.check()
        self._ledger.write(step, sealed, record, metrics)
        self._attempts.progressed(step)
        self._ledger.settle(step, sealed, metrics)

    def _figures(
        self, step: int, sealed: SealedStep, record: StepRecord, updates: Mapping[Role, UpdateResult]
    ) -> dict[str, float]:
        prepared = sealed.prepared
        staleness = {"staleness": step - 1 - prepared.experience.policy_version} if self._staleness.most else {}
        rates = {f"learning_rate_{role}": rate for role, rate in self._updates.learning_rates(step).items()}
        return {
            "step": step,
            **prepared.metrics,
            **record.figures,
            "set_aside": len(sealed.collected.set_aside),
            **staleness,
            **update_metrics(updates),
            **rates,
        }
