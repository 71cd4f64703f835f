"""The run: the lead, step after step with what is due between them, and the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog

from quartet.buffer.connection import connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.lease import Lease
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config
from quartet.durable_files import storing
from quartet.errors import ConfigError, LeadershipConflict, QuartetError
from quartet.evaluation import stream_name
from quartet.models.loading import load_tokenizer
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.checkpoints import DamagedCheckpoint, roll_back, whole_checkpoint
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.algorithm.updates import Updates
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import Saving
from quartet.services.orchestrator.checkpointing.recovery import RECOVERABLE, Attempts, Recovery
from quartet.services.orchestrator.checkpointing.step_committer import StepCommitter
from quartet.services.orchestrator.control.commands import Commands
from quartet.services.orchestrator.control.live_settings import Changes
from quartet.services.orchestrator.control.progress import ProgressBoard, RunState
from quartet.services.orchestrator.control.run_control import Control
from quartet.services.orchestrator.leadership import Leadership
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.rollout.evaluation_schedule import EvaluationSchedule
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.services.orchestrator.rollout.preparation import Preparation
from quartet.services.orchestrator.rollout.prompts import training_prompts, validation_prompts
from quartet.services.orchestrator.service_clients import ServiceClients, Statuses
from quartet.services.orchestrator.service_handshake import ServiceHandshake, identify
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.telemetry.run_telemetry import Telemetry
from quartet.services.orchestrator.telemetry.stopwatch import Stopwatch
from quartet.telemetry.traces import StepTraces, Traces, Untraced
from quartet.types import Alert

log = structlog.get_logger()


class RollbackRequested(Exception):
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
        self._service_clients = ServiceClients(config, credentials)
        self._traces: StepTraces = traces or Untraced()
        if traces is not None:
            self._service_clients.observe(traces)
        self._stopwatch = Stopwatch(self._traces.part)
        self._telemetry = Telemetry(config, self._files, board)
        timeline = self._telemetry.timeline
        self._preparation = Preparation(config, self._service_clients, self._stream, board, timeline)
        self._saving = Saving(
            config, self._files, self._service_clients, self._experience, board, self._stopwatch, timeline
        )
        self._changes = Changes(config, self._files)
        self.commands = Commands(control, self._changes, self._files)
        self._evaluations = EvaluationSchedule(self._run, self._files, board, self._telemetry)
        self._off_policy = OffPolicySchedule.of(config)
        self._attempts = Attempts(config.recovery)
        self._handshake = ServiceHandshake(config, url, self._redis, self._service_clients, board, control)
        self._name = secrets.token_hex(16)
        self._identity: Identity
        self._steps: StepTransaction
        self._lease: Lease | None = None
        self._leadership: Leadership
        self._stopped_by: Alert | None = None

    def run(self) -> None:
        """Trains, from the last committed step on. Raises the first thing that goes wrong; a step that failed leaves no trace."""
        try:
            self._run_to_the_end()
        finally:
            self.close()

    def _run_to_the_end(self) -> None:
        statuses = self._handshake.first()
        self._set_up(statuses)
        self._prepared()
        while True:
            try:
                self._leadership = self._take_the_lead(statuses)
                self._board.update(state=RunState.TRAINING, phase="generate")
                step = self._take_steps()
                self._saving.save_policy(step, self._leadership.epoch)
                break
            except LeadershipConflict:
                raise
            except RECOVERABLE as error:
                self._pause_after(error)
                statuses = self._handshake.again(statuses, self._identity)
            except RollbackRequested:
                statuses = self._handshake.again(statuses, self._identity)
        if self._stopped_by is not None:
            why = f"stopped by guard {self._stopped_by.guard} after step {step}; the policy is saved in {self._files.policy}"
            self._board.update(state=RunState.FAILED, phase="done", error=why, exit_code=1)
            return
        finished = step == self._config.run.steps
        self._board.update(state=RunState.FINISHED if finished else RunState.STOPPED, phase="done")

    @property
    def exit_code(self) -> int:
        """Of a run that came to its end: 1 where a guard stopped it."""
        return 0 if self._stopped_by is None else 1

    def close(self) -> None:
        """Ends what the training started, and its lead. May be called again, and from another thread."""
        self._preparation.discard()
        self._evaluations.close()
        if self._lease is not None:
            self._lease.release()
        self._telemetry.close()

    def _set_up(self, statuses: Statuses) -> None:
        """Loads what steps and evaluations are made of, and says who the run is. Raises ConfigError."""
        config, files, timeline = self._config, self._files, self._telemetry.timeline
        tokenizer = load_tokenizer(config.actor.model)
        order = training_prompts(config, tokenizer, statuses, self._board.note)
        if config.evaluation.every_steps:
            self._evaluations.begin(self._make_evaluator(tokenizer, statuses))
        begun = bool(files.committed()) or self._saving.newest(verify=False) is not None
        found = {client.role: statuses[client.role].micro_batch_tokens for client in self._service_clients.trained}
        self._identity = identify(config, files, begun, found)
        self._handshake.tell_of_memory(statuses, self._identity)
        self._telemetry.begin(tokenizer, self._identity.id)
        store, telemetry, board, stopwatch = self._experience, self._telemetry, self._board, self._stopwatch
        self._steps = StepTransaction(
            order,
            self._off_policy,
            self._preparation,
            Updates(config, self._identity, self._service_clients, self._changes, board, timeline),
            StepCommitter(config, tokenizer, files, self._stream, store, telemetry, board, stopwatch),
            self._saving,
            self._attempts,
            self._traces,
        )

    def _make_evaluator(self, tokenizer: Any, statuses: Statuses) -> Evaluator:
        return Evaluator(
            self._config,
            self._service_clients.actor,
            RolloutStream(self._redis, self._url, stream_name(self._run)),
            self._service_clients.scoring(with_critic=False),
            validation_prompts(self._config, tokenizer, statuses, self._board.note),
            tokenizer,
            self._files,
        )

    def _pause_after(self, error: QuartetError) -> None:
        """Waits before the next attempt. Raises ``error`` when it is one too many."""
        pause = self._attempts.pause_after(error)
        log.warning("recovering", error=str(error), pause=pause)
        self._board.recovering(str(error))
        time.sleep(pause)

    def _take_the_lead(self, statuses: Statuses) -> Leadership:
        """Takes the lease, and brings the models and the algorithm's own state to the last committed step."""
        newest = self._saving.newest(verify=False)
        seen = [status.leader_epoch for status in statuses.values()] + ([newest.leader_epoch] if newest else [])
        led = 0
        if self._lease is not None:
            self._lease.release()
            led = self._lease.epoch
            seen.append(led)
        # A new epoch also for who led before: what it asked for may still be under way.
        lease = self._lease = Lease(self._redis, self._url, self._run, at_least=1 + max(seen), owner=self._name)
        log.info("leading", epoch=lease.epoch)
        self._preparation.discard()
        self._control.open()
        self._roll_back()
        self._board.update(phase="going to the last committed step")
        self._stream.reset(lease.epoch)
        # Another run of this name may have used the same Redis, and the same services.
        ours = lease.claim(self._identity.id)
        if not ours:
            self._experience.keep_only([])
        algorithm_state = AlgorithmState(self._config)
        recovery = Recovery(
            self._config,
            self._files,
            self._service_clients,
            self._experience,
            lease.epoch,
            self._identity,
            trusted=lambda status: ours or status.leader_epoch <= led,
        )
        recovered = recovery.to_last_commit(self._saving.newest, statuses, algorithm_state, self._steps.pending_step)
        step, base = recovered.step, recovered.checkpoint
        self._saving.go_back(base, step)
        self._evaluations.go_on()
        self._telemetry.continues_from(step)
        # What the guards found in the last step counts also where the run broke off before it was heeded.
        self._apply_alerts(
            [alert for alert in algorithm_state.found if asdict(alert) not in self._files.alerts_of(step)]
        )
        if self._control.stopping:
            self._stopped_by = next((alert for alert in algorithm_state.found if alert.action == "stop"), None)
        self._changes.resume(recovered.committed, algorithm_state.kl_coefficient)
        self._experience.keep_only(range(base + 1, step + 1))
        self._board.update(step=step)
        for note in (*self._saving.passed_over(), *recovered.notes()):
            self._board.note(note)
        if step:
            log.info("resumed", step=step, checkpoint=base)
        return Leadership(lease, algorithm_state, recovery, recovered, self._stopwatch)

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
            self._steps.discard()
            self._attempts.go_back(step)
        self._control.rolled_back()

    def _take_steps(self) -> int:
        """Steps, evaluations, checkpoints, until the end or a stop. Gives the last step."""
        algorithm_state = self._leadership.algorithm_state
        step = algorithm_state.step
        self._catch_up(step)
        # What was due after the last committed step, where the run broke off before it.
        self._evaluate(step)
        self._checkpoint(step, exposed=not self._leadership.recovered.covered)
        self._process_commands(step)
        while step < self._config.run.steps and not self._is_last(step):
            step += 1
            with self._traces.step(step):
                algorithm_state.set_kl_coefficient(self._changes.begin(step, algorithm_state.kl_coefficient))
                alerts = self._steps.take(step, self._leadership, self._goes_straight_on)
            self._apply_alerts(alerts)
            self._evaluate(step)
            self._process_commands(step)
        self._preparation.discard()
        # A run that was stopped while it paused learns only now that this step is its last.
        self._evaluate(step)
        self._checkpoint(step)
        while not self._control.close():
            self._process_commands(step)
        self._saving.finish(self._leadership)
        return step

    def _catch_up(self, step: int) -> None:
        """Takes the policy to ``step`` where recovery left it behind, for the sake of what it generates first."""
        version = self._steps.policy_version(step + 1)
        if version < step and self._steps.pending_step != step + 1:
            self._steps.begin_ahead(step + 1, self._leadership)
            self._leadership.recovery.replay(self._service_clients.actor, version, step, self._files.committed())

    def _goes_straight_on(self, step: int) -> bool:
        """Whether nothing is to be done between ``step`` and the next one, as far as can be seen."""
        evaluates = self._evaluations.is_due(step, last=False)
        saves = self._saving.is_due(step, last=False, asked=False)
        return step < self._config.run.steps and self._control.idle and not evaluates and not saves

    def _checkpoint(self, step: int, exposed: bool = False) -> None:
        """Begins a checkpoint where one is due. The next step goes on meanwhile, up to its update.

        ``exposed``: the buffer has lost what leads to ``step``, so one is due now, unless a model may be a step ahead already.
        """
        # Where policies are stale, a checkpoint that is not due would change the policy that generates the next step.
        exposed = exposed and self._steps.pending_step is None and not self._off_policy.most
        asked = self._control.take_checkpoint()
        if asked and step == 0:
            self._board.note("no checkpoint saved: no step is taken yet")
        if self._saving.is_due(step, self._is_last(step) or exposed, asked):
            self._saving.finish(self._leadership)
            self._leadership.check()
            self._preparation.discard()
            if self._off_policy.most:
                # A stale policy has generated the next step already; by rule the checkpoint's does.
                self._stream.reset(self._leadership.epoch)
            self._saving.begin(step, self._leadership.epoch, self._leadership.algorithm_state.state())

    def _evaluate(self, step: int) -> None:
        if self._evaluations.is_due(step, self._is_last(step)):
            if not self._off_policy.most:
                self._preparation.discard()
            self._evaluations.evaluate(step, self._leadership.epoch)

    def _is_last(self, step: int) -> bool:
        # One that is sealed may have reached one of the models: it is taken to its end.
        sealed = self._steps.pending_step == step + 1
        # Nor does a run end before what it had committed.
        owed = sealed or step < self._leadership.recovered.committed
        return step == self._config.run.steps or (self._control.stopping and not owed)

    def _apply_alerts(self, alerts: list[Alert]) -> None:
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

    def _process_commands(self, step: int) -> None:
        """Does what users ask for between two steps, and waits while the run is paused. Raises RollbackRequested."""
        self._check_rollback()
        self._checkpoint(step)
        if step == self._config.run.steps or not self._control.paused:
            return
        log.info("paused")
        while self._control.paused:
            self._saving.finish(self._leadership)
            self._board.update(state=RunState.PAUSED, phase="paused")
            self._control.wait_while_paused()
            self._check_rollback()
            self._checkpoint(step)
        log.info("going on", stopping=self._control.stopping)
        self._board.update(state=RunState.TRAINING, phase="generate")

    def _check_rollback(self) -> None:
        """Raises RollbackRequested where a user asks for an earlier checkpoint. A checkpoint under way is let go."""
        if self._control.going_back_to:
            raise RollbackRequested
