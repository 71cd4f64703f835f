"""One step as a transaction: prepare, seal, update, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from quartet.config.live_settings import with_values
from quartet.config.models import TrainedModelConfig
from quartet.config.root import Config
from quartet.contract.control import Alert
from quartet.contract.status import Role
from quartet.contract.update import UpdateResult
from quartet.data.prompt_order import PromptSequence, StepPrompts
from quartet.errors import ServiceFailed, TooManyFailedTrajectories
from quartet.run_directory.checkpoints import EVALUATION_PREFIX
from quartet.run_directory.identity import Identity
from quartet.services.orchestrator.algorithm import update_request
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.checkpointing.recovery import RecoveryAttempts
from quartet.services.orchestrator.checkpointing.step_artifacts import (
    StepRecord,
    failed_trajectories_note,
    failed_trajectory_rows,
    in_flight_metrics,
    left_out_rows,
    outcome_metrics,
    part_metrics,
    step_record,
    update_metrics,
)
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.leadership import Leadership
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.services.orchestrator.rollout.sampling_rounds import SamplingRounds
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from quartet.services.orchestrator.service_clients import wait_for_all
from quartet.services.orchestrator.step_preparation import PendingStep, StepPreparation
from quartet.services.orchestrator.telemetry.utilisation import Utilisation
from quartet.system.failpoints import failpoint

log = structlog.get_logger()


class StepTransaction:
    """Transaction over one step at a time. Until a step is committed, nothing that the next step builds on has changed.

    A prepared step stays pending across failures of the services, because a model may already have applied it.
    """

    def __init__(
        self,
        run: RunContext,
        identity: Identity,
        tokenizer: Any,
        order: StepPrompts,
        preparation: StepPreparation,
        checkpoints: CheckpointScheduler,
        attempts: RecoveryAttempts,
        utilisation: Utilisation,
        evaluator: Evaluator,
    ) -> None:
        """``identity`` holds the micro-batch sizes of the run. ``tokenizer`` decodes the responses.

        ``checkpoints`` finishes the checkpoint in progress before the models change. ``attempts`` records every commit.
        ``evaluator`` finishes the evaluation beside a step before its commit.
        """
        self._run, self._board, self._profiler = run, run.board, run.profiler
        self._rollout, self._off_policy = run.config.rollout, OffPolicySchedule.of(run.config)
        # A step is generated ahead while those before it consume prompts, so each takes them from the last one that has ended.
        stride = self._rollout.max_off_policy_steps + 1
        self._sequences = [
            PromptSequence(order, self._rollout.prompts_per_step, first, stride) for first in range(1, stride + 1)
        ]
        self._identity, self._tokenizer, self._preparation = identity, tokenizer, preparation
        self._checkpoints, self._attempts, self._utilisation = checkpoints, attempts, utilisation
        self._evaluator = evaluator
        best_metric = run.config.checkpoint.best_metric or ""
        self._evaluation_chooses_best = best_metric.startswith(EVALUATION_PREFIX)
        self._pending: PendingStep | None = None

    @property
    def pending_step(self) -> int | None:
        """The step that is prepared and not committed."""
        return self._pending.step if self._pending else None

    def discard(self) -> None:
        """Drop the pending step, because the run rolls back."""
        self._pending = None

    def policy_version(self, step: int) -> int:
        """Return the number of updates of the policy that generates ``step``."""
        return self._off_policy.policy_version(step, self._checkpoints.newest_step)

    def start_generations(self, step: int, newest: int, leadership: Leadership) -> None:
        """Start the generation of ``step`` and of later steps, as far as the schedule allows with ``newest`` updates taken."""
        for each in self._off_policy.startable(step, self._checkpoints.newest_step, newest):
            prompts = self._first_round(each, leadership).prompts
            self._preparation.start_generation(each, prompts, leadership.epoch, self.policy_version(each))

    def take(self, step: int, leadership: Leadership, continues_directly: Callable[[int], bool]) -> list[Alert]:
        """Take one step, or finish it if it is pending. Returns the alerts of the guards.

        ``continues_directly`` returns whether the next step can start directly after this one.
        """
        started = time.perf_counter()
        if self._pending is None or self._pending.step != step:
            self._pending = self._prepare(step, leadership)
        pending = self._pending
        self._seal(pending)
        # The evaluation of a checkpoint decides whether it is the best one, and so which one is dropped.
        evaluation_wait = self._finish_evaluation(leadership) if self._evaluation_chooses_best else 0.0
        self._checkpoints.finish(leadership.check)
        # Off-policy, the next steps are generated by policies before this update.
        self.start_generations(step + 1, step - 1, leadership)
        with self._profiler.span(Role.ORCHESTRATOR, "update", waits=True) as updating:
            updates, record = self._update(step, leadership, pending, continues_directly)
        failpoint("orchestrator.updated")
        # A committed step has the evaluation before it: a process that continues there could not repeat it.
        evaluation_wait += self._finish_evaluation(leadership)
        algorithm = self._config_at(step, leadership.algorithm_state).algorithm
        metrics = {
            **self._metrics(step, pending, record, updates),
            **({"entropy_coefficient": algorithm.entropy_coefficient} if algorithm.trains_entropy else {}),
            "seconds": time.perf_counter() - started,
            "generate_seconds": pending.collected.generate_seconds,
            "score_seconds": pending.collected.score_seconds,
            "update_seconds": updating.seconds,
            **({"evaluation_wait_seconds": evaluation_wait} if self._evaluator.is_beside_training else {}),
        }
        if "entropy" in metrics:
            metrics["entropy_slope"] = leadership.algorithm_state.entropy_slope(metrics["entropy"])
        leadership.check()
        self._commit(step, pending, record, metrics)
        self._attempts.record_commit(step)
        self._clean_up(step, pending, metrics)
        self._report(step, metrics, started)
        self._pending = None
        return leadership.algorithm_state.commit(metrics, [item.score for item in pending.collected.scored])

    def _finish_evaluation(self, leadership: Leadership) -> float:
        """Wait for the evaluation beside this step. Return the seconds of the wait. See ``Evaluator.finish``."""
        if not self._evaluator.is_running:
            return 0.0
        with self._profiler.span(Role.ORCHESTRATOR, "evaluate", waits=True):
            return self._evaluator.finish(leadership.check)

    def _first_round(self, step: int, leadership: Leadership) -> SamplingRounds:
        """Return the rounds of ``step``, at its first one. It begins at the first prompt of its sequence that is not consumed."""
        index, consumed = (step - 1) % len(self._sequences), leadership.algorithm_state.prompts_consumed_before(step)
        # The last step of the sequence before this one may be pending.
        if self._pending is not None and self._pending.step == step - len(self._sequences):
            consumed = self._pending.rounds.consumed
        return SamplingRounds(step, self._rollout, self._sequences[index], consumed)

    def _prepare(self, step: int, leadership: Leadership) -> PendingStep:
        version, rounds = self.policy_version(step), self._first_round(step, leadership)
        try:
            return self._preparation.prepare(step, rounds, leadership.epoch, version, leadership.algorithm_state)
        except (TooManyFailedTrajectories, ServiceFailed) as error:
            if error.failed_trajectories:
                self._write_failed_trajectories(step, error.failed_trajectories)
            raise

    def _update(
        self, step: int, leadership: Leadership, pending: PendingStep, continues_directly: Callable[[int], bool]
    ) -> tuple[dict[Role, UpdateResult], StepRecord]:
        """Update the models, and compute the diagnostics of the step while they train."""
        self._board.update(phase="update")
        calls = self._start_updates(step, leadership.epoch, leadership.algorithm_state)
        record = self._record(pending)
        published = False

        def start_next_generation() -> None:
            nonlocal published
            # The actor is ready for the next step, even if the critic still trains.
            if calls[Role.ACTOR].done() and not published:
                published = True
                self._preparation.policy_updated(leadership.epoch, calls[Role.ACTOR].result().publication)
            if calls[Role.ACTOR].done() and continues_directly(step):
                self.start_generations(step + 1, step, leadership)

        wait_for_all(list(calls.values()), start_next_generation)
        return {role: call.result() for role, call in calls.items()}, record

    def _start_updates(
        self, step: int, leader_epoch: int, algorithm_state: AlgorithmState
    ) -> dict[Role, Future[UpdateResult]]:
        """Start the updates of ``step``, the next after ``algorithm_state``, at all trained models together."""
        rates, config = self._learning_rates(step), self._config_at(step, algorithm_state)
        calls = {}
        for client in self._run.clients.trained:
            tokens = self._identity.micro_batch_tokens_of(client.role)
            calls[client.role] = update_request.start_update(
                client, config, step, leader_epoch, rates[client.role], tokens
            )
        for role, call in calls.items():
            self._profiler.observe(role, "update", call)
        return calls

    def _config_at(self, step: int, algorithm_state: AlgorithmState) -> Config:
        """Return the config of ``step``, the next after ``algorithm_state``: with live changes, and what controllers hold."""
        return with_values(self._run.live_settings.config_at(step), algorithm_state.coefficients)

    def _learning_rates(self, step: int) -> dict[Role, float]:
        """Return the learning rate of each trained model in ``step``: its schedule, scaled by live changes."""
        config, changed, rates = self._run.config, self._run.live_settings.config_at(step), {}
        for role in (client.role for client in self._run.clients.trained):
            own: TrainedModelConfig = getattr(config, role)
            scale = getattr(changed, role).learning_rate / own.learning_rate
            rates[role] = update_request.learning_rate_at(config, own, step) * scale
        return rates

    def _seal(self, pending: PendingStep) -> None:
        """Write the experience to the buffer. From here on, any leader can replay the step."""
        failpoint("orchestrator.sealing")
        with self._profiler.span("redis", "seal"):
            self._run.experience.seal(pending.prepared.experience)
        failpoint("orchestrator.sealed")

    def _record(self, pending: PendingStep) -> StepRecord:
        """Return the diagnostics of the step's responses."""
        return step_record(self._tokenizer, pending.collected, pending.prepared, pending.prompt_sets)

    def _write_failed_trajectories(
        self, step: int, trajectories: Sequence[FailedTrajectory], skipped_prompts: Collection[int] = ()
    ) -> None:
        """Write the trajectories of ``step`` that could not be scored. ``skipped_prompts``: see ``CollectedStep``."""
        rows = failed_trajectory_rows(self._tokenizer, trajectories, skipped_prompts)
        self._run.files.write_failed_trajectories(step, rows)

    def _commit(self, step: int, pending: PendingStep, record: StepRecord, metrics: dict[str, float]) -> None:
        """Write the step to the run's files. The step is committed once its line of metrics is on disk."""
        with self._profiler.span(Role.ORCHESTRATOR, "commit"):
            self._run.telemetry.write_tokens(step, pending.prepared)
            self._run.files.write_trajectories(step, record.rows)
            collected = pending.collected
            self._write_failed_trajectories(step, collected.failed_trajectories, collected.skipped_prompts)
            self._run.files.write_left_out(step, left_out_rows(step, collected.left_out))
            self._run.files.append_metrics(metrics)

    def _clean_up(self, step: int, pending: PendingStep, metrics: dict[str, float]) -> None:
        """Publish the progress of a committed step, and free its entries in the buffer."""
        collected = pending.collected
        self._board.commit(step, metrics)
        failpoint("orchestrator.committed")
        with self._profiler.span("redis", "acknowledge"):
            self._run.stream.acknowledge(collected.entry_ids)
            if self._run.turns is not None:
                self._run.turns.forget_step(step)
        failpoint("orchestrator.acknowledged")
        if self._run.config.checkpoint.every_steps == 0:
            self._run.experience.discard([step])
        if collected.failed_trajectories:
            self._board.note(failed_trajectories_note(step, collected))

    def _report(self, step: int, metrics: dict[str, float], started: float) -> None:
        """Pass a committed step to telemetry and log. ``started`` is the step's start by ``time.perf_counter``."""
        self._run.telemetry.committed(step, started, metrics, self._run.devices.take(started))
        log.info(
            "step committed",
            step=step,
            **{name: metrics[name] for name in ("reward_mean",) if name in metrics},
            kl_mean=metrics["kl_mean"],
            seconds=time.perf_counter() - started,
            **self._profiler.take_seconds(),
        )

    def _metrics(
        self, step: int, pending: PendingStep, record: StepRecord, updates: Mapping[Role, UpdateResult]
    ) -> dict[str, float]:
        prepared = pending.prepared
        trajectories = [item.trajectory for item in pending.collected.scored]
        lag, in_flight = step - 1 - prepared.experience.policy_version, self._rollout.in_flight_updates
        calls = self._profiler.take_calls()
        exposed = {"weights_exposed_seconds": calls.exposed} if self._run.config.has_generators else {}
        generated = pending.collected.generated_tokens
        rates = {f"learning_rate_{role}": rate for role, rate in self._learning_rates(step).items()}
        return {
            "step": step,
            **prepared.metrics,
            **part_metrics(pending.collected.scored, pending.part_weights, pending.collected.cured_faults),
            "cured_faults": sum(pending.collected.cured_faults.values()),
            **record.metrics,
            **pending.rounds.metrics(),
            "failed_trajectories": len(pending.collected.failed_trajectories),
            "skipped_prompts": len(pending.collected.skipped_prompts),
            **outcome_metrics(pending.collected.failed_trajectories),
            **({"outcome_left_out": len(pending.collected.left_out)} if self._rollout.extra_samples else {}),
            **({"off_policy_steps": lag} if self._off_policy.max_off_policy_steps else {}),
            **(in_flight_metrics(step, prepared.experience.policy_version, trajectories) if in_flight else {}),
            **update_metrics(updates),
            **rates,
            **self._preparation.take_metrics(prepared.experience.policy_version),
            **exposed,
            **self._utilisation.metrics(step, prepared.experience, generated, calls),
            **self._run.devices.metrics(),
        }
