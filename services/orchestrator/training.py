"""The run: step after step, each a transaction of prepare, apply, commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog

from quartet.buffer.connection import connect, wait_for_server
from quartet.buffer.experience import ExperienceStore
from quartet.buffer.lease import Lease
from quartet.buffer.rollouts import RolloutStream
from quartet.checkpoints import DamagedCheckpoint, roll_back, whole_checkpoint
from quartet.config import MOST_MICRO_BATCH_TOKENS, Config, TrainedModelConfig
from quartet.data import PromptOrder
from quartet.errors import (
    AnotherLeads,
    Cancelled,
    ComputationFailed,
    ConfigError,
    InvalidRequest,
    QuartetError,
    TooManySetAside,
)
from quartet.evaluation import stream_name
from quartet.failpoints import failpoint
from quartet.files import storing
from quartet.identity import Identity
from quartet.models.loading import load_tokenizer
from quartet.rpc.credentials import LOCAL, Credentials
from quartet.telemetry.run_files import RunFiles
from quartet.telemetry.traces import StepTraces, Traces, Untraced
from quartet.types import (
    Alert,
    Role,
    UpdateResult,
)
from services.orchestrator.changes import Changes
from services.orchestrator.collector import CollectedStep, wait_for_all
from services.orchestrator.commands import Commands
from services.orchestrator.control import Control
from services.orchestrator.course import Course
from services.orchestrator.evaluation import Evaluator
from services.orchestrator.experience import PreparedStep
from services.orchestrator.peers import Peers, Statuses, check_agreement, check_same
from services.orchestrator.preparation import Preparation, SealedStep
from services.orchestrator.progress import ProgressBoard, RunState
from services.orchestrator.prompts import training_prompts, validation_prompts
from services.orchestrator.records import (
    StepRecord,
    evaluation_poison,
    memory_notes,
    poison_lines,
    poison_note,
    step_record,
    update_metrics,
)
from services.orchestrator.recovery import RECOVERABLE, Attempts, Recovered, Recovery
from services.orchestrator.saving import Saving
from services.orchestrator.settings import begin_update, learning_rate_at
from services.orchestrator.staleness import Staleness
from services.orchestrator.stopwatch import Stopwatch
from services.orchestrator.telemetry import Telemetry

log = structlog.get_logger()


class WentBack(Exception):
    """A user asks for an earlier checkpoint: whoever leads next begins there."""


class Training:
    """One run from its first step to its saved policy."""

    def __init__(
        self,
        config: Config,
        url: str,
        board: ProgressBoard,
        control: Control,
        prepared: Callable[[], None] = lambda: None,
        traces: Traces | None = None,
        credentials: Credentials = LOCAL,
    ) -> None:
        """Connects to the buffer at ``url``. ``prepared`` is called once, when everything is loaded and no step is taken.

        ``traces`` take notice of every step and its calls; ``credentials`` are what the services are shown.
        Raises ConfigError or ServiceUnavailable.
        """
        self._config, self._board, self._control, self._prepared = config, board, control, prepared
        self._run = config.run.name
        self._files = RunFiles(config.run_directory)
        self._url, self._redis = url, connect(url)
        self._stream = RolloutStream(self._redis, url, self._run)
        self._experience = ExperienceStore(self._redis, url, self._run)
        self._peers = Peers(config, credentials)
        self._traces: StepTraces = traces or Untraced()
        if traces is not None:
            self._peers.observe(traces)
        self._stopwatch = Stopwatch(self._traces.part)
        self._telemetry = Telemetry(config, self._files, board)
        timeline = self._timeline = self._telemetry.timeline
        self._preparation = Preparation(config, self._peers, self._stream, board, timeline)
        self._saving = Saving(config, self._files, self._peers, self._experience, board, self._stopwatch, timeline)
        self._course = Course(config)
        self._changes = Changes(config, self._files)
        self.commands = Commands(control, self._changes, self._files)
        self._staleness = Staleness.of(config)
        self._attempts = Attempts(config.recovery)
        self._asked_before = control.stopping
        self._lease: Lease | None = None
        self._identity: Identity
        self._recovery: Recovery
        self._recovered: Recovered
        self._name = secrets.token_hex(16)
        self._sealed: SealedStep | None = None
        """The step in hand, once it is prepared: it is as good as applied, whatever happens to the services."""
        self._stopped_by: Alert | None = None
        self._tokenizer: Any = None
        self._evaluator: Evaluator | None = None
        self._evaluated: int | None = None

    def run(self) -> None:
        """Trains, from the last committed step on. Raises the first thing that goes wrong; a step that failed leaves no trace."""
        try:
            self._run_to_the_end()
        finally:
            self.close()

    def _run_to_the_end(self) -> None:
        statuses = self._meet()
        self._tokenizer = load_tokenizer(self._config.actor.model)
        order = training_prompts(self._config, self._tokenizer, statuses, self._board.note)
        self._evaluator = self._make_evaluator(statuses)
        self._identity = self._identify(statuses)
        self._tell_of_memory(statuses)
        self._telemetry.begin(self._tokenizer, self._identity.id)
        self._prepared()
        while True:
            try:
                self._lead(statuses)
                self._board.update(state=RunState.TRAINING, phase="generate")
                step = self._take_steps(order)
                self._saving.save_policy(step, self._epoch)
                break
            except AnotherLeads:
                raise
            except RECOVERABLE as error:
                statuses = self._meet_again(statuses, error)
            except WentBack:
                statuses = self._meet_back(statuses)
        if self._stopped_by is not None:
            why = f"stopped by guard {self._stopped_by.guard} after step {step}; the policy is saved in {self._files.policy}"
            self._board.update(state=RunState.FAILED, phase="done", error=why, exit_code=1)
            return
        finished = step == self._config.run.steps
        self._board.update(state=RunState.FINISHED if finished else RunState.STOPPED, phase="done")

    def close(self) -> None:
        """Ends what the training started, and its lead. May be called again, and from another thread."""
        self._preparation.let_go()
        if self._evaluator is not None:
            self._evaluator.close()
        if self._lease is not None:
            self._lease.release()
        self._telemetry.close()

    def _meet(self) -> Statuses:
        """What every service says of itself, once all are there and fit together. Raises ConfigError where one cannot be used."""
        statuses = self._peers.wait_until_ready(self._show_waiting, self._raise_if_stopping)
        check_agreement(statuses, self._run, needs_reference=not self._config.has_reference)
        return statuses

    def _meet_again(self, before: Statuses, error: QuartetError) -> Statuses:
        """The same after a failure, once the buffer and all services are back. Raises ``error`` when it is one too many."""
        pause = self._attempts.pause_after(error)
        log.warning("recovering", error=str(error), pause=pause)
        self._board.recovering(str(error))
        time.sleep(pause)
        return self._meet_back(before)

    def _meet_back(self, before: Statuses) -> Statuses:
        """What every service says of itself, once it is there. Raises MismatchError when one is not what it was ``before``."""
        self._board.update(phase="waiting for redis")
        wait_for_server(self._redis, self._url, self._config.timeouts.load)
        statuses = self._peers.wait_until_back(self._show_waiting)
        check_same(before, statuses)
        anew = {role: status for role, status in statuses.items() if status.free_bytes != before[role].free_bytes}
        self._tell_of_memory(anew)
        check_agreement(statuses, self._run, needs_reference=not self._config.has_reference)
        return statuses

    def _identify(self, statuses: Statuses) -> Identity:
        """Who the run is: as it was, where it has taken a step. Raises ConfigError for a config that another run had."""
        found = Identity.read(self._files.identity)
        begun = bool(self._files.committed()) or self._saving.newest(verify=False) is not None
        sizes = {client.role: statuses[client.role].micro_batch_tokens for client in self._peers.trained}
        if begun and found is None:
            # From before runs had an identity, when this was the default.
            sizes = dict.fromkeys(sizes, MOST_MICRO_BATCH_TOKENS)
        if begun and found is not None:
            found.check(self._config, self._files.root)
            identity = found.completed(sizes)
        else:
            identity = Identity.new(self._config, sizes)
        if identity != found:
            identity.write(self._files.identity)
        return identity

    def _tell_of_memory(self, statuses: Statuses) -> None:
        for role, status in statuses.items():
            for note in memory_notes(status, self._identity.micro_batch_tokens_of(role)):
                self._board.note(note)

    def _show_waiting(self, role: Role) -> None:
        self._board.update(phase=f"waiting for {role}")

    def _take_steps(self, order: PromptOrder) -> int:
        """Steps, evaluations, checkpoints, until the end or a stop. Gives the last step."""
        step = self._course.step
        self._catch_up(step, order)
        # What was due after the last committed step, where the run broke off before it.
        self._evaluate(step)
        self._checkpoint(step, exposed=not self._recovered.covered)
        self._hear(step)
        while step < self._config.run.steps and not self._is_last(step):
            step += 1
            with self._traces.step(step):
                alerts = self._take_step(step, order)
            self._heed(alerts)
            self._evaluate(step)
            self._hear(step)
        self._preparation.let_go()
        # A run that was stopped while it paused learns only now that this step is its last.
        self._evaluate(step)
        self._checkpoint(step)
        while not self._control.close():
            self._hear(step)
        self._finish_checkpoint()
        return step

    def _catch_up(self, step: int, order: PromptOrder) -> None:
        """Takes the policy to ``step`` where recovery left it behind, for the sake of what it generates first."""
        version = self._policy_version(step + 1)
        sealed = self._sealed is not None and self._sealed.step == step + 1
        if version < step and not sealed:
            self._preparation.begin(step + 1, order.of_step(step + 1), self._epoch, version)
            self._recovery.replay(self._peers.actor, version, step, self._files.committed())

    def _policy_version(self, step: int) -> int:
        """Updates that the policy which generates ``step`` has taken."""
        return self._staleness.policy_version(step, self._saving.newest_step)

    def _checkpoint(self, step: int, exposed: bool = False) -> None:
        """Begins a checkpoint where one is due. The next step goes on meanwhile; its update waits for ``_finish_checkpoint``.

        ``exposed``: the buffer has lost what leads to ``step``, so one is due now, unless a model may be a step ahead already.
        """
        # Where policies are stale, a checkpoint that is not due would change the policy that generates the next step.
        exposed = exposed and self._sealed is None and not self._staleness.most
        asked = self._control.take_checkpoint()
        if asked and step == 0:
            self._board.note("no checkpoint saved: no step is taken yet")
        if self._saving.is_due(step, self._is_last(step) or exposed, asked):
            self._finish_checkpoint()
            self._check_lease()
            self._preparation.let_go()
            if self._staleness.most:
                # A stale policy has generated the next step already; by rule the checkpoint's does.
                self._stream.reset(self._epoch)
            self._saving.begin(step, self._epoch, self._course.state())

    def _finish_checkpoint(self) -> None:
        if self._saving.under_way:
            self._check_lease()
            self._saving.finish()

    def _evaluate(self, step: int) -> None:
        evaluator = self._evaluator
        if evaluator is None or step == self._evaluated or not evaluator.is_due(step, last=self._is_last(step)):
            return
        self._evaluated = step
        if not self._staleness.most:
            self._preparation.let_go()
        self._board.update(phase="evaluate", scored=0, wanted=evaluator.responses)
        try:
            summary = evaluator.evaluate(step, policy_version=step, on_progress=self._board.show_scored)
        except (ComputationFailed, InvalidRequest) as error:
            if step == 0:
                raise  # All later ones would be held against it.
            # Training does not depend on it. The error's text may quote a response, which is no matter for a log.
            self._files.append_poison(evaluation_poison(self._run, step, error))
            log.warning("evaluation failed", step=step, error=type(error).__name__)
            self._board.note(
                f"evaluation after step {step} failed ({type(error).__name__}), see poison.jsonl; the run goes on"
            )
            return
        log.info("evaluated", step=step, **summary)
        self._telemetry.evaluated(step, summary)
        figures = ", ".join(f"{name.removeprefix('eval_').replace('_', ' ')} {summary[name]:.2f}" for name in summary)
        self._board.note(f"evaluation after step {step}: {figures}")

    def _is_last(self, step: int) -> bool:
        # One that is sealed may have reached one of the models: it is taken to its end.
        sealed = self._sealed is not None and self._sealed.step == step + 1
        # Nor does a run end before what it had committed.
        owed = sealed or step < self._recovered.committed
        return step == self._config.run.steps or (self._control.stopping and not owed)

    @property
    def exit_code(self) -> int:
        """Of a run that came to its end: 1 where a guard stopped it."""
        return 0 if self._stopped_by is None else 1

    def _heed(self, alerts: list[Alert]) -> None:
        """Writes down what the guards found, and does what they are configured to do."""
        for alert in alerts:
            log.warning("guard", **asdict(alert))
            # Done before it is written: what is written counts as done.
            if alert.action == "pause":
                self._control.pause()
            if alert.action == "stop":
                self._stopped_by = self._stopped_by or alert
                self._control.stop()
            self._files.append_alert(alert)
            self._board.alert(alert)
            self._telemetry.alert(alert)

    def _hear(self, step: int) -> None:
        """Does what users ask for between two steps, and waits while the run is paused. Raises WentBack."""
        self._turn_back()
        self._checkpoint(step)
        if step == self._config.run.steps or not self._control.paused:
            return
        log.info("paused")
        while self._control.paused:
            self._finish_checkpoint()
            self._board.update(state=RunState.PAUSED, phase="paused")
            self._control.wait_while_paused()
            self._turn_back()
            self._checkpoint(step)
        log.info("going on", stopping=self._control.stopping)
        self._board.update(state=RunState.TRAINING, phase="generate")

    def _turn_back(self) -> None:
        """Raises WentBack where a user asks for an earlier checkpoint. A checkpoint under way is let go."""
        if self._control.going_back_to:
            raise WentBack

    def _roll_back(self) -> None:
        """Takes the run's files back to a checkpoint where a user asks for it; also where a crash broke that off."""
        step = self._control.going_back_to
        if not step:
            return
        # What was changed meanwhile would be for steps of another course.
        self._changes.close()
        try:
            whole_checkpoint(self._files.checkpoints / f"step-{step:06d}")
            with storing(self._files.root):
                roll_back(self._files, step)
        except (ConfigError, DamagedCheckpoint) as error:
            log.warning("not rolled back", step=step, error=str(error))
            self._board.note(f"not rolled back to step {step}: {error}")
        else:
            log.info("rolled back", step=step)
            self._board.note(f"rolled back to step {step}, as asked")
            self._sealed = None
            self._attempts.go_back(step)
        self._control.rolled_back()

    def _lead(self, statuses: Statuses) -> None:
        """Takes the lease, and brings the models and the algorithm's own state to the last committed step."""
        newest = self._saving.newest(verify=False)
        seen = [status.leader_epoch for status in statuses.values()] + ([newest.leader_epoch] if newest else [])
        led = 0
        if self._lease is not None:
            self._lease.release()
            led = self._lease.epoch
            seen.append(led)
        # A new epoch also for who led before: what it asked for may still be under way.
        self._lease = Lease(self._redis, self._url, self._run, at_least=1 + max(seen), owner=self._name)
        log.info("leading", epoch=self._epoch)
        self._preparation.let_go()
        self._control.open()
        self._roll_back()
        self._board.update(phase="going to the last committed step")
        self._stream.reset(self._epoch)
        if self._evaluator is not None:
            self._evaluator.leader_epoch = self._epoch
        self._course = Course(self._config)
        # Another run of this name may have used the same Redis, and the same services.
        ours = self._lease.claim(self._identity.id)
        if not ours:
            self._experience.keep_only([])
        self._recovery = recovery = Recovery(
            self._config,
            self._files,
            self._peers,
            self._experience,
            self._epoch,
            self._identity,
            trusted=lambda status: ours or status.leader_epoch <= led,
        )
        sealed = self._sealed.step if self._sealed else None
        self._recovered = recovery.to_last_commit(self._saving.newest, statuses, self._course, sealed)
        step, base = self._recovered.step, self._recovered.checkpoint
        self._saving.go_back(base, step)
        self._evaluated = self._files.evaluated()
        self._telemetry.goes_on(step)
        # What the guards found in the last step counts also where the run broke off before it was heeded.
        self._heed([alert for alert in self._course.found if asdict(alert) not in self._files.alerts_of(step)])
        if self._control.stopping:
            self._stopped_by = next((alert for alert in self._course.found if alert.action == "stop"), None)
        self._changes.resume(self._recovered.committed, self._course.kl_coefficient)
        self._experience.keep_only(range(base + 1, step + 1))
        self._tell_where_it_goes_on(self._recovered)

    def _tell_where_it_goes_on(self, recovered: Recovered) -> None:
        step, base = recovered.step, recovered.checkpoint
        self._board.update(step=step)
        for problem in self._saving.passed_over():
            self._board.note(problem)
        if step < recovered.committed:
            self._board.note(
                f"steps {step + 1} to {recovered.committed} are taken again: the buffer has lost what leads there from "
                + (f"the checkpoint of step {base}" if base else "the start, and there is no checkpoint")
            )
        if step:
            self._board.note(f"going on after step {step}")
            log.info("resumed", step=step, checkpoint=base)

    def _check_lease(self) -> None:
        assert self._lease is not None
        with self._stopwatch.part("lease"):
            self._lease.check()

    @property
    def _epoch(self) -> int:
        assert self._lease is not None
        return self._lease.epoch

    def _make_evaluator(self, statuses: Statuses) -> Evaluator | None:
        if not self._config.evaluation.every:
            return None
        return Evaluator(
            self._config,
            self._peers.actor,
            RolloutStream(self._redis, self._url, stream_name(self._run)),
            self._peers.scoring(with_critic=False),
            validation_prompts(self._config, self._tokenizer, statuses, self._board.note),
            self._tokenizer,
            self._files,
        )

    def _take_step(self, step: int, order: PromptOrder) -> list[Alert]:
        start = time.perf_counter()
        self._course.set_kl_coefficient(self._changes.begin(step, self._course.kl_coefficient))
        if self._sealed is None or self._sealed.step != step:
            try:
                self._sealed = self._prepare(step, order)
            except TooManySetAside as error:
                self._files.write_poison(step, poison_lines(self._tokenizer, error.set_aside))
                raise
        collected, prepared = self._sealed.collected, self._sealed.prepared
        failpoint("orchestrator.sealing")
        with self._stopwatch.part("seal"), self._timeline.part("redis", "seal"):
            self._experience.seal(prepared.experience)
        failpoint("orchestrator.sealed")
        self._finish_checkpoint()
        if (version := self._policy_version(step + 1)) < step:
            # Before the update begins: from then on the policy is on its way to another.
            self._preparation.begin(step + 1, order.of_step(step + 1), self._epoch, version)
        self._board.update(phase="update")
        updating = time.perf_counter()
        with self._traces.part("update"):
            updates, record = self._update(step, order, self._sealed)
        failpoint("orchestrator.updated")
        end = time.perf_counter()
        metrics = {
            "step": step,
            **prepared.metrics,
            **record.figures,
            "set_aside": len(collected.set_aside),
            **({"staleness": step - 1 - prepared.experience.policy_version} if self._staleness.most else {}),
            **update_metrics(updates),
            **{
                f"learning_rate_{client.role}": self._learning_rate(client.role, step) for client in self._peers.trained
            },
            "seconds": end - start,
            "seconds_generate": collected.seconds_generate,
            "seconds_score": collected.seconds_score,
            "seconds_update": end - updating,
        }
        if "entropy" in metrics:
            metrics["entropy_slope"] = self._course.entropy_slope(metrics["entropy"])
        self._commit(step, collected, prepared, record, metrics)
        self._telemetry.committed(step, start, metrics)
        self._sealed = None
        log.info("committed", step=step, seconds=time.perf_counter() - start, **self._stopwatch.lap())
        return self._course.commit(metrics, [item.score for item in collected.scored])

    def _prepare(self, step: int, order: PromptOrder) -> SealedStep:
        with self._traces.part("prepare"):
            version = self._policy_version(step)
            return self._preparation.prepare(step, order.of_step(step), self._epoch, version, self._course)

    def _learning_rate(self, role: Role, step: int) -> float:
        trained: TrainedModelConfig = getattr(self._config, role)
        return learning_rate_at(self._config, trained, step) * self._changes.learning_rate_factor(role, step)

    def _update(self, step: int, order: PromptOrder, sealed: SealedStep) -> tuple[dict[Role, UpdateResult], StepRecord]:
        """What the models say of their updates; and, made while they learn, the record of what they learn from."""
        calls = {
            client.role: begin_update(
                client,
                self._config,
                step,
                self._epoch,
                self._learning_rate(client.role, step),
                self._identity.micro_batch_tokens_of(client.role),
            )
            for client in self._peers.trained
        }
        for role, call in calls.items():
            self._timeline.watch(role, "update", call)
        record = step_record(self._tokenizer, sealed.collected, sealed.prepared)

        def go_ahead() -> None:
            # The policy is as the next step wants it, whatever the critic still does.
            if calls[Role.ACTOR].done() and self._goes_straight_on(step):
                self._preparation.begin(step + 1, order.of_step(step + 1), self._epoch, step)

        wait_for_all(list(calls.values()), go_ahead)
        return {role: call.result() for role, call in calls.items()}, record

    def _goes_straight_on(self, step: int) -> bool:
        """Whether nothing is to be done between ``step`` and the next one, as far as can be seen."""
        evaluates = self._evaluator is not None and self._evaluator.is_due(step, last=False)
        saves = self._saving.is_due(step, last=False, asked=False)
        return step < self._config.run.steps and self._control.idle and not evaluates and not saves

    def _commit(
        self,
        step: int,
        collected: CollectedStep,
        prepared: PreparedStep,
        record: StepRecord,
        metrics: dict[str, float],
    ) -> None:
        self._check_lease()
        with self._stopwatch.part("commit"), self._timeline.part(Role.ORCHESTRATOR, "commit"):
            self._telemetry.keep_tokens(step, prepared)
            self._files.write_trajectories(step, record.lines)
            self._files.write_poison(step, poison_lines(self._tokenizer, collected.set_aside))
            self._files.append_metrics(metrics)
        self._attempts.progressed(step)
        self._board.commit(step, metrics)
        failpoint("orchestrator.committed")
        with self._stopwatch.part("acknowledge"), self._timeline.part("redis", "acknowledge"):
            self._stream.acknowledge(collected.entry_ids)
        failpoint("orchestrator.acknowledged")
        if self._config.checkpoint.every == 0:
            self._experience.discard([step])
        if collected.set_aside:
            self._board.note(poison_note(step, collected))
        log.info("step", **{name: metrics[name] for name in ("step", "reward_mean", "kl_mean", "seconds")})

    def _raise_if_stopping(self) -> None:
        # A stop that the orchestrator before this one was asked for is for the end of its step: the policy is to be saved.
        if self._control.stopping and not self._asked_before:
            raise Cancelled("stopped while waiting for the services")


def train(training: Training, board: ProgressBoard, finished: Callable[[int], None]) -> None:
    """Runs the training to its end, notes how it ended on the board, and passes its exit status on."""
    try:
        training.run()
    except Cancelled as error:
        board.update(state=RunState.STOPPED, phase="done", error=str(error))
        finished(0)
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        log.error("run failed", error=str(error), exc_info=None if code == 2 else error)
        board.update(state=RunState.FAILED, phase="failed", error=str(error) or type(error).__name__, exit_code=code)
        finished(code)
    else:
        finished(training.exit_code)
