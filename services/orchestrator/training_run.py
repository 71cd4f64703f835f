"""A training run: steps in sequence, with evaluations, checkpoints and commands between them, and recovery after failures."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import structlog

from quartet.buffer.lease import Lease
from quartet.buffer.traffic import TrafficStore
from quartet.config.root import Config
from quartet.contract.control import Alert, RunState
from quartet.contract.status import GeneratorInfo
from quartet.data.prompt_cache import set_contents
from quartet.errors import Cancelled, ConfigError, LeadershipConflict, QuartetError, ServiceFailed, StorageFailed
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.preflight.repeatability import moved_note
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.checkpoints import DamagedCheckpoint, read_verified_checkpoint, roll_back
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles, RunOutcome
from quartet.services.orchestrator.algorithm.advantages import import_estimator
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.checkpoint_scheduler import CheckpointScheduler
from quartet.services.orchestrator.checkpointing.recovery import TRANSIENT_ERRORS, Recovery, RecoveryAttempts
from quartet.services.orchestrator.checkpointing.reference_synchronizer import ReferenceSynchronizer
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.handshake import (
    ServiceHandshake,
    load_identity,
    model_files_of,
)
from quartet.services.orchestrator.leadership import Leadership, acquire_lease
from quartet.services.orchestrator.rollout.collector import CommandWaits
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.rollout.prompts import evaluation_sets, training_prompts, validation_prompts
from quartet.services.orchestrator.service_clients import ServiceStatuses
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.step_preparation import StepPreparation
from quartet.services.orchestrator.telemetry.utilisation import Utilisation
from quartet.system.durable_files import storage_errors
from quartet.system.failpoints import failpoint
from quartet.telemetry.traces import Traces

log = structlog.get_logger()


class RollbackRequested(Exception):
    """A user has requested an earlier checkpoint. The next term of leadership starts there."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The parts of a run that depend on its services. Created once all services have responded."""

    identity: Identity
    evaluator: Evaluator
    steps: StepTransaction


class TrainingRun:
    """One run from its first step to its saved policy."""

    def __init__(
        self,
        config: Config,
        url: str,
        board: ProgressBoard,
        control: RunControl,
        on_ready: Callable[[], None] = lambda: None,
        traces: Traces | None = None,
        credentials: Credentials = LOCAL,
    ) -> None:
        """Connect to the buffer at ``url``. ``on_ready`` is called once, after loading and before the first step.

        ``traces`` export every step and its calls. ``credentials`` authenticate this process to the services. Raises ConfigError
        or ServiceUnavailable.
        """
        failpoint("orchestrator.loading")
        self._run = run = RunContext.connect(config, url, board, control, traces, credentials)
        self._config, self._files, self._board, self._on_ready = config, run.files, board, on_ready
        self._preparation, self._checkpoints = StepPreparation(run), CheckpointScheduler(run)
        self._alerts, self._attempts = AlertHandler(run), RecoveryAttempts(config.recovery)
        self._handshake = ServiceHandshake(run)
        self.live_settings = run.live_settings
        self._owner = secrets.token_hex(16)
        self._lease: Lease | None = None
        self._evaluator: Evaluator | None = None
        self._interrupted = threading.Event()
        self.has_outcome = False
        """True once the run has ended or failed by itself, and not because its process ends."""

    def run(self) -> RunOutcome:
        """Train from the last committed step to the end. Raises the first error that recovery cannot handle."""
        try:
            outcome = self._run_to_end()
            self.has_outcome = True
            return outcome
        except Exception:
            # Before ``close``: an interruption during it is not the cause.
            self.has_outcome = not self._interrupted.is_set()
            raise
        finally:
            self.close()

    def generators(self) -> list[GeneratorInfo]:
        """Return the generators in separate processes. May be called from another thread."""
        return self._run.generation.generators()

    def interrupt(self) -> None:
        """Stop the work in progress, because the process ends. May be called from another thread.

        The errors that this causes are not the end of the run: the next process continues it.
        """
        self._interrupted.set()
        self.close()

    def close(self) -> None:
        """Stop the work in progress and release the lease. May be called again, and from another thread."""
        with ExitStack() as stack:
            # Each is called even if one before it raises.
            stack.callback(self._run.telemetry.close)
            stack.callback(self._run.devices.close)
            if self._lease is not None:
                stack.callback(self._lease.release)
            if self._evaluator is not None:
                stack.callback(self._evaluator.close)
            stack.callback(self._run.clients.close_replicas)
            stack.callback(self._run.generation.close)
            stack.callback(self._preparation.discard)

    def _run_to_end(self) -> RunOutcome:
        failpoint("orchestrator.starting")
        # Before waiting for the services: a custom estimator that cannot be used ends the run at once.
        import_estimator(self._config.algorithm.estimator_spec)
        statuses = self._handshake.start()
        loaded = self._load(statuses)
        self._on_ready()
        while True:
            try:
                leadership = self._acquire_leadership(loaded, statuses)
                self._board.update(state=RunState.TRAINING, phase="generate")
                step = self._train(loaded, leadership)
                self._checkpoints.save_policy(step, leadership.epoch)
                break
            except LeadershipConflict:
                raise
            except TRANSIENT_ERRORS as error:
                if self._interrupted.is_set():
                    raise
                self._pause_after(error)
                statuses = self._handshake.reconnect(statuses, loaded.identity)
            except RollbackRequested:
                statuses = self._handshake.reconnect(statuses, loaded.identity)
        if (alert := self._alerts.stopped_by) is not None:
            error_text = (
                f"stopped by guard {alert.guard} after step {step}; the policy is saved in {self._files.policy}"
            )
            return RunOutcome.of(ServiceFailed(error_text), step)
        return RunOutcome(RunState.FINISHED if step >= self._config.run.steps else RunState.STOPPED, step)

    def _load(self, statuses: ServiceStatuses) -> LoadedRun:
        """Load prompts, tokenizer and identity. Raises ConfigError."""
        config, files = self._config, self._files
        tokenizer = load_tokenizer(config.actor.model)
        started = bool(files.read_committed()) or self._checkpoints.newest(verify=False) is not None
        stored = Identity.read(files.identity) if started else None
        contents = set_contents(config, stored.revisions if stored else {}, self._show_phase)
        revisions = {key: content.revision for key, content in contents.items()}
        order = training_prompts(config, statuses, self._board.note, self._show_phase, revisions)
        evaluates = config.evaluation.every_steps > 0
        has_validation = evaluates and config.data.has_validation
        prompts = validation_prompts(config, statuses, self._board.note, revisions) if has_validation else []
        sets = evaluation_sets(config, statuses, self._board.note, revisions) if evaluates else []
        evaluator = self._evaluator = Evaluator(self._run, prompts, tokenizer, sets)
        micro_batches = {client.role: statuses[client.role].micro_batch_tokens for client in self._run.clients.trained}
        engines = self._run.generation.engines()
        if stored is not None and (moved := moved_note(stored.engines, engines)):
            log.warning("resumed with other bits", reason=moved)
            self._board.note(moved)
        for engine in engines:
            log.info("engine of the run", **asdict(engine))
        identity = load_identity(config, files, started, micro_batches, contents, model_files_of(statuses), engines)
        self._handshake.note_memory(statuses, identity)
        self._run.telemetry.start(tokenizer, identity.id)
        self._run.devices.start()
        steps = StepTransaction(
            self._run,
            identity,
            tokenizer,
            order,
            self._preparation,
            self._checkpoints,
            self._attempts,
            Utilisation(config, statuses, self._run.generation),
            evaluator,
        )
        return LoadedRun(identity, evaluator, steps)

    def _show_phase(self, line: str) -> None:
        self._board.update(phase=line)

    def _pause_after(self, error: QuartetError) -> None:
        """Wait before the next attempt. Raises ``error`` if no attempt is left."""
        pause = self._attempts.pause_after(error)
        log.warning("recovery started", error=str(error), pause_seconds=pause)
        self._board.recovering(str(error))
        self._interrupted.wait(pause)

    def _acquire_leadership(self, loaded: LoadedRun, statuses: ServiceStatuses) -> Leadership:
        """Acquire the lease, and bring the models and the algorithm's state to the last committed step."""
        newest = self._checkpoints.newest(verify=False)
        epochs_seen = [status.leader_epoch for status in statuses.values()] + ([newest.leader_epoch] if newest else [])
        epochs_seen += self._run.generation.leader_epochs()
        led_epoch = self._lease.epoch if self._lease is not None else 0
        lease = self._lease = acquire_lease(self._run, self._owner, self._lease, epochs_seen)
        if self._interrupted.is_set():
            # ``close`` may have released the lease before this one.
            lease.release()
            raise Cancelled("the process ends")
        self._preparation.discard()
        loaded.evaluator.abandon()
        self._run.control.open()
        self._roll_back_if_requested(loaded)
        self._board.update(phase="recovering the last committed step")
        self._run.stream.reset(lease.epoch)
        # Another run of this name may have used the same Redis and the same services.
        is_own_buffer = lease.claim(loaded.identity.id)
        if not is_own_buffer:
            self._run.experience.keep_only([])
            if isinstance(self._run.turns, TrafficStore):
                self._run.turns.remove_all()
            elif self._run.turns is not None:
                self._run.turns.forget_all()
            loaded.evaluator.forget_turns()
        own_models = [role for role, status in statuses.items() if is_own_buffer or status.leader_epoch <= led_epoch]
        algorithm_state = AlgorithmState(self._config)
        recovery = Recovery(self._run, lease.epoch, loaded.identity, own_models)
        point = recovery.to_last_commit(self._checkpoints.newest, statuses, algorithm_state, loaded.steps.pending_step)
        self._checkpoints.resume(point.checkpoint, point.step)
        loaded.evaluator.resume()
        self._run.telemetry.continues_from(point.step)
        self._alerts.resume(point.step, algorithm_state.alerts)
        self.live_settings.resume(point.committed, algorithm_state)
        self._run.experience.keep_only(range(point.checkpoint + 1, point.step + 1))
        if point.step < point.committed and not self._config.has_traffic:
            # Weights that are computed again have the same bits only where arithmetic repeats. Users ask only once.
            self._forget_turns(loaded)
        elif self._run.turns is not None:
            self._run.turns.forget_before(point.step + 1)
        self._board.update(step=point.step)
        for note in (*self._checkpoints.take_skipped(), *point.notes()):
            self._board.note(note)
        if point.step:
            log.info("training resumed", step=point.step, checkpoint=point.checkpoint)
        return Leadership(lease, algorithm_state, recovery, point, self._run.profiler)

    def _forget_turns(self, loaded: LoadedRun) -> None:
        """Remove all turn records, because they may be those of other weights."""
        if self._run.turns is not None:
            self._run.turns.forget_all()
        loaded.evaluator.forget_turns()

    def _roll_back_if_requested(self, loaded: LoadedRun) -> None:
        """Take the run's files back to a checkpoint if a user has requested it. Also completes an interrupted rollback."""
        step = self._run.control.rollback_step
        if not step:
            return
        # A change made from now on would apply to steps that the rollback drops.
        self.live_settings.close()
        # The policy that comes now may have the version of an earlier one, and other weights.
        self._forget_turns(loaded)
        try:
            read_verified_checkpoint(self._files.checkpoints / f"step-{step:06d}")
            with storage_errors(self._files.root):
                roll_back(self._files, step)
        except (ConfigError, DamagedCheckpoint) as error:
            log.warning("rollback failed", step=step, error=str(error))
            self._board.note(f"not rolled back to step {step}: {error}")
        else:
            log.info("rollback completed", step=step)
            self._board.note(f"rolled back to step {step}, as requested")
            loaded.steps.discard()
            self._attempts.record_rollback(step)
        self._run.control.finish_rollback()

    def _train(self, loaded: LoadedRun, leadership: Leadership) -> int:
        """Take steps until the end of the run or a stop. Returns the last step."""
        return TrainingLoop(self._run, loaded, leadership, self._preparation, self._checkpoints, self._alerts).run()


class AlertHandler:
    """Handler of alerts: reports them, carries out their actions, and remembers which one stopped the run."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._board, self._control = run, run.board, run.control
        self.stopped_by: Alert | None = None
        """The first alert whose action is to stop the run."""

    def apply(self, alerts: Sequence[Alert]) -> None:
        """Carry out the action of each alert, and record the alert."""
        for alert in alerts:
            log.warning("guard alert", **asdict(alert))
            # Before the alert is written: a written alert counts as applied.
            if alert.action == "pause":
                self._control.pause()
            if alert.action == "stop":
                self.stopped_by = self.stopped_by or alert
                self._control.stop()
            self._run.files.append_alert(alert)
            self._board.alert(alert)
            self._run.telemetry.alert(alert)

    def resume(self, step: int, alerts: Sequence[Alert]) -> None:
        """Apply those ``alerts`` of the last committed ``step`` that an interrupted process has not applied."""
        written = self._run.files.read_alerts(step)
        self.apply([alert for alert in alerts if asdict(alert) not in written])
        if self._control.stopping:
            self.stopped_by = next((alert for alert in alerts if alert.action == "stop"), None)


class TrainingLoop:
    """Steps under one leadership, with the evaluations, checkpoints and commands between them."""

    def __init__(
        self,
        run: RunContext,
        loaded: LoadedRun,
        leadership: Leadership,
        preparation: StepPreparation,
        checkpoints: CheckpointScheduler,
        alerts: AlertHandler,
    ) -> None:
        self._run, self._control, self._board = run, run.control, run.board
        self._num_steps, self._off_policy = run.config.run.steps, run.config.rollout.max_off_policy_steps > 0
        self._evaluator, self._steps, self._leadership = loaded.evaluator, loaded.steps, leadership
        self._preparation, self._checkpoints, self._alerts = preparation, checkpoints, alerts
        self._reference = ReferenceSynchronizer(run)

    def run(self) -> int:
        """Take steps until the end of the run or a stop. Returns the last step."""
        algorithm_state = self._leadership.algorithm_state
        step = algorithm_state.step
        # An interrupted process may have skipped what was due after the last committed step.
        self._synchronize_reference(step)
        self._evaluate_if_due(step)
        self._checkpoint_if_due(step, unprotected=not self._leadership.recovery_point.replayable)
        self._process_commands(step)
        while step < self._num_steps and not self._is_last(step):
            step += 1
            self._run.profiles.begin_step(step)
            with self._run.profiler.step(step):
                self._run.live_settings.start_step(step)
                self._preparation.may_be_left = not self._must_finish(step)
                try:
                    alerts = self._steps.take(step, self._leadership, self._continues_directly)
                except CommandWaits:
                    step -= 1
                    self._preparation.discard()
                    self._process_commands(step)
                    continue
            self._run.profiles.end_step(step)
            self._alerts.apply(alerts)
            self._synchronize_reference(step)
            self._evaluate_if_due(step)
            self._process_commands(step)
        self._preparation.discard()
        self._run.profiles.finish()
        self._evaluator.finish(self._leadership.check)
        # A stop during a pause makes this step the last one only now.
        self._evaluate_if_due(step)
        self._checkpoint_if_due(step)
        while not self._control.close():
            self._process_commands(step)
        self._checkpoints.finish(self._leadership.check)
        return step

    def _continues_directly(self, step: int) -> bool:
        """Return whether the next step can start directly after ``step``, as currently known."""
        evaluates = self._evaluator.is_due(step, last=False) and not self._evaluator.is_beside_training
        saves = self._checkpoints.is_due(step, last=False, requested=False)
        waits = evaluates or saves or self._reference.is_due(step)
        waits = waits or self._run.profiles.is_boundary(step)
        return step < self._num_steps and self._control.idle and not waits

    def _synchronize_reference(self, step: int) -> None:
        """Bring the reference to its version for the next step, before anything is scored."""
        self._reference.synchronize(step, self._leadership.epoch, self._leadership.check)

    def _checkpoint_if_due(self, step: int, unprotected: bool = False) -> None:
        """Start a checkpoint if one is due. The next step continues in parallel, up to its update.

        ``unprotected``: the buffer has lost the experience before ``step``, so a checkpoint is due now unless a model may be a
        step ahead.
        """
        # Off-policy, an extra checkpoint would change the policy version that generates the next step.
        unprotected = unprotected and self._steps.pending_step is None and not self._off_policy
        requested = self._control.take_checkpoint_command()
        if requested and step == 0:
            self._board.note("no checkpoint saved: no step has been taken yet")
        if self._checkpoints.is_due(step, self._is_last(step) or unprotected, requested):
            self._checkpoints.finish(self._leadership.check)
            self._leadership.check()
            self._preparation.discard()
            if self._off_policy:
                # Older policies may have generated the next steps already, but after a checkpoint its own policy does.
                self._run.stream.reset(self._leadership.epoch)
            self._checkpoints.start(step, self._leadership.epoch, self._leadership.algorithm_state.state())

    def _evaluate_if_due(self, step: int) -> None:
        is_last = self._is_last(step)
        if self._evaluator.is_due(step, is_last):
            if self._evaluator.is_beside_training and not is_last:
                self._evaluator.start(step, self._leadership.epoch)
                return
            if not self._off_policy:
                self._preparation.discard()
            self._evaluator.evaluate_and_report(step, self._leadership.epoch)

    def _is_last(self, step: int) -> bool:
        return step == self._num_steps or (self._control.stopping and not self._must_finish(step + 1))

    def _must_finish(self, step: int) -> bool:
        # One of the models may have applied the pending step. And a run does not stop before a step that it had committed.
        return self._steps.pending_step == step or step <= self._leadership.recovery_point.committed

    def _process_commands(self, step: int) -> None:
        """Carry out the commands of users between two steps, and wait while the run is paused. Raises RollbackRequested."""
        self._check_rollback()
        self._checkpoint_if_due(step)
        if step == self._num_steps or not self._control.paused:
            return
        log.info("run paused", step=step, remedy="quartet resume continues it")
        self._evaluator.finish(self._leadership.check)
        while self._control.paused:
            self._checkpoints.finish(self._leadership.check)
            self._board.update(state=RunState.PAUSED, phase="paused")
            self._control.wait_while_paused()
            self._check_rollback()
            self._checkpoint_if_due(step)
        log.info("run continued", step=step, stopping=self._control.stopping)
        self._board.update(state=RunState.TRAINING, phase="generate")

    def _check_rollback(self) -> None:
        """Raise RollbackRequested if a user has requested an earlier checkpoint. A checkpoint in progress is abandoned."""
        if self._control.rollback_step:
            raise RollbackRequested


def run_training(run: TrainingRun, files: RunFiles, board: ProgressBoard, on_end: Callable[[RunOutcome], None]) -> None:
    """Run to the end, on the calling thread. Records the outcome, ends the progress with it and passes it to ``on_end``.

    A run that is interrupted before its end has no outcome.
    """
    try:
        outcome = run.run()
    except Exception as error:
        if not run.has_outcome:
            log.info("run interrupted", error=str(error))
            return
        step = board.current().step
        if isinstance(error, Cancelled):
            outcome = RunOutcome(RunState.STOPPED, step, message=str(error))
        else:
            outcome = RunOutcome.of(error, step)
            log.error("run failed", error=str(error), exc_info=None if outcome.exit_status == 2 else error)
    try:
        files.write_outcome(outcome)
    except StorageFailed as error:
        log.error("outcome not recorded", error=str(error))
    board.end(outcome)
    on_end(outcome)
