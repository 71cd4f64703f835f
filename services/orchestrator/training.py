"""The run: step after step, each a transaction of prepare, apply, commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from quartet.buffer.connection import connect, wait_for_server
from quartet.buffer.experience import ExperienceStore
from quartet.buffer.lease import Lease
from quartet.buffer.rollouts import RolloutStream
from quartet.config import Config, TrainedModelConfig
from quartet.data import PromptEncoder, PromptOrder, encode_prompts, iterate_prompt_lines
from quartet.errors import AnotherLeads, Cancelled, ConfigError, QuartetError, ServiceFailed, StorageFailed, Unanswered
from quartet.evaluation import read_validation_prompts, run_sampling, stream_name
from quartet.failpoints import failpoint
from quartet.files import check_saved
from quartet.models.loading import load_tokenizer
from quartet.rpc.clients import PendingResult
from quartet.telemetry.run_files import RunFiles
from quartet.types import (
    Alert,
    Prompt,
    Role,
    SaveKind,
    TrajectoryId,
    UpdateResult,
)
from services.orchestrator.checkpoints import Checkpoints, PendingCheckpoint
from services.orchestrator.collector import CollectedStep, Collector, Replacement, wait_for_all
from services.orchestrator.control import Control
from services.orchestrator.course import Course
from services.orchestrator.evaluation import Evaluator
from services.orchestrator.experience import PreparedStep, prepare_step
from services.orchestrator.peers import Peers, Statuses, check_agreement, check_lengths, check_same
from services.orchestrator.progress import ProgressBoard, RunState
from services.orchestrator.records import poison_lines, poison_note, trajectory_lines, update_metrics
from services.orchestrator.recovery import RECOVERABLE, Attempts, Recovery
from services.orchestrator.settings import begin_update, learning_rate_at
from services.orchestrator.stopwatch import Stopwatch

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A step whose experience is sealed: it is as good as applied, whatever happens to the services."""

    step: int
    collected: CollectedStep
    prepared: PreparedStep


class Training:
    """One run from its first step to its saved policy."""

    def __init__(self, config: Config, url: str, board: ProgressBoard, control: Control) -> None:
        """Connects to the buffer at ``url``. Raises ConfigError or ServiceUnavailable."""
        self._config, self._board, self._control = config, board, control
        self._run = config.run.name
        self._files = RunFiles(config.run_directory)
        self._url, self._redis = url, connect(url)
        self._stream = RolloutStream(self._redis, url, self._run)
        self._experience = ExperienceStore(self._redis, url, self._run)
        self._peers = Peers(config)
        self._collector = Collector(self._stream, self._peers.scoring(), config.rollout.score_batch)
        self._checkpoints = Checkpoints(self._files, config.checkpoint.keep, config.to_yaml())
        self._course = Course(config)
        self._attempts = Attempts(config.recovery)
        self._lease: Lease | None = None
        self._name = secrets.token_hex(16)
        self._sealed: SealedStep | None = None
        self._stopped_by: Alert | None = None
        self._tokenizer: Any = None
        self._evaluator: Evaluator | None = None
        self._evaluated: int | None = None
        self._saved = self._unsaved = 0
        self._pending: PendingCheckpoint | None = None
        self._stopwatch = Stopwatch()

    def run(self) -> None:
        """Trains, from the last committed step on. Raises the first thing that goes wrong; a step that failed leaves no trace."""
        try:
            self._run_to_the_end()
        finally:
            self.close()

    def _run_to_the_end(self) -> None:
        statuses = self._meet()
        order = self._prepare(statuses)
        while True:
            try:
                self._lead(statuses)
                self._board.update(state=RunState.TRAINING, phase="generate")
                step = self._take_steps(order)
                self._save_policy(step)
                break
            except AnotherLeads:
                raise
            except RECOVERABLE as error:
                statuses = self._meet_again(statuses, error)
        if self._stopped_by is not None:
            why = f"stopped by guard {self._stopped_by.guard} after step {step}; the policy is saved in {self._files.policy}"
            self._board.update(state=RunState.FAILED, phase="done", error=why, exit_code=1)
            return
        finished = step == self._config.run.steps
        self._board.update(state=RunState.FINISHED if finished else RunState.STOPPED, phase="done")

    def close(self) -> None:
        """Ends the processes that the training started, and its lead. May be called again, and from another thread."""
        if self._evaluator is not None:
            self._evaluator.close()
        if self._lease is not None:
            self._lease.release()

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
        self._board.update(phase="waiting for redis")
        wait_for_server(self._redis, self._url, self._config.timeouts.load)
        statuses = self._peers.wait_until_back(self._show_waiting)
        check_same(before, statuses)
        check_agreement(statuses, self._run, needs_reference=not self._config.has_reference)
        return statuses

    def _show_waiting(self, role: Role) -> None:
        self._board.update(phase=f"waiting for {role}")

    def _take_steps(self, order: PromptOrder) -> int:
        """Steps, evaluations, checkpoints, until the end or a stop. Gives the last step."""
        step = self._course.step
        # What was due after the last committed step, where the run broke off before it.
        self._evaluate(step)
        self._checkpoint(step)
        if step < self._config.run.steps:
            self._wait_while_paused()
        while step < self._config.run.steps and not self._is_last(step):
            step += 1
            self._heed(self._take_step(step, order))
            self._evaluate(step)
            self._checkpoint(step)
            if step < self._config.run.steps:
                self._wait_while_paused()
        # A run that was stopped while it paused learns only now that this step is its last.
        self._evaluate(step)
        self._checkpoint(step)
        self._finish_checkpoint()
        return step

    def _evaluate(self, step: int) -> None:
        evaluator = self._evaluator
        if evaluator is None or step == self._evaluated or not evaluator.is_due(step, last=self._is_last(step)):
            return
        self._evaluated = step
        self._board.update(phase="evaluate", scored=0, wanted=evaluator.responses)
        summary = evaluator.evaluate(step, policy_version=step, on_progress=self._show_scored)
        log.info("evaluated", step=step, **summary)
        figures = ", ".join(f"{name.removeprefix('eval_').replace('_', ' ')} {summary[name]:.2f}" for name in summary)
        self._board.note(f"evaluation after step {step}: {figures}")

    def _is_last(self, step: int) -> bool:
        # One that is sealed may have reached one of the models: it is taken to its end.
        sealed = self._sealed is not None and self._sealed.step == step + 1
        return step == self._config.run.steps or (self._control.stopping and not sealed)

    @property
    def exit_code(self) -> int:
        """Of a run that came to its end: 1 where a guard stopped it."""
        return 0 if self._stopped_by is None else 1

    def _save_policy(self, step: int) -> None:
        self._board.update(phase="save")
        wanted = {self._files.policy: SaveKind.MODEL}
        if self._config.actor.lora is not None:
            wanted[self._files.adapter] = SaveKind.ADAPTER
        for path, kind in wanted.items():
            saving = self._peers.actor.save(self._run, self._epoch, path.name, kind, step)
            wait_for_all([saving])
            check_saved(self._files.root, saving.result())
            log.info("saved", kind=kind, path=str(path), step=step)

    def _checkpoint(self, step: int) -> None:
        """Begins a checkpoint where one is due. The next step goes on meanwhile; its update waits for ``_finish_checkpoint``."""
        every = self._config.checkpoint.every
        under_way = self._pending.step if self._pending else None
        if every == 0 or step in (under_way, self._saved, self._unsaved):
            return
        if step % every and not self._is_last(step):
            return
        self._finish_checkpoint()
        with self._stopwatch.part("checkpoint"):
            trained, state = self._peers.trained, self._course.state()
            self._pending = self._checkpoints.begin(self._run, step, self._epoch, trained, state)

    def _finish_checkpoint(self) -> None:
        """Waits for the checkpoint under way, if there is one. One that cannot be written is noted; the run goes on without."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.done():
            self._board.update(phase="checkpoint")
        try:
            with self._stopwatch.part("checkpoint"):
                if self._lease is not None:
                    self._lease.check()
                pending.finish()
        except Unanswered:
            raise  # That is a service's trouble, not the disk's.
        except (ServiceFailed, StorageFailed) as error:
            self._unsaved = pending.step
            kept = f"step {self._saved}'s stays" if self._saved else "there is none yet"
            self._board.note(f"checkpoint of step {pending.step} failed: {error}; {kept}; the next is tried as usual")
            log.warning("checkpoint failed", step=pending.step, newest=self._saved, error=str(error))
        else:
            # What a checkpoint covers need not be replayed.
            covered, self._saved = range(self._saved + 1, pending.step + 1), pending.step
            with self._stopwatch.part("checkpoint"):
                self._experience.discard(covered)

    def _abandon_checkpoint(self) -> None:
        """Lets go of the checkpoint under way: without its manifest it is none, and it is begun again where it is due."""
        if self._pending is not None:
            self._pending.abandon()
        self._pending = None

    def _heed(self, alerts: list[Alert]) -> None:
        """Writes down what the guards found, and does what they are configured to do."""
        for alert in alerts:
            log.warning("guard", **asdict(alert))
            self._files.append_alert(alert)
            self._board.alert(alert)
            if alert.action == "pause":
                self._control.pause()
            if alert.action == "stop":
                self._stopped_by = self._stopped_by or alert
                self._control.stop()

    def _wait_while_paused(self) -> None:
        if not self._control.paused:
            return
        self._finish_checkpoint()
        log.info("paused")
        self._board.update(state=RunState.PAUSED, phase="paused")
        self._control.wait_while_paused()
        log.info("going on", stopping=self._control.stopping)
        self._board.update(state=RunState.TRAINING, phase="generate")

    def _prepare(self, statuses: Statuses) -> PromptOrder:
        """Reads the prompts. Raises ConfigError."""
        self._tokenizer = load_tokenizer(self._config.actor.model)
        stop_ids = {self._tokenizer.eos_token_id} - {None}
        prompts = encode_prompts(
            self._config.data.prompts,
            iterate_prompt_lines(self._config.data.prompts),
            PromptEncoder.of(self._tokenizer, self._config.actor.model),
            frozenset(stop_ids),
            statuses[Role.ACTOR].vocabulary_size,
            self._config.data.max_prompt_tokens,
        )
        for note in prompts.notes:
            log.warning(note)
            self._board.note(note)
        longest = max(len(prompt.token_ids) for prompt in prompts.prompts)
        check_lengths(statuses, longest, self._config.rollout.max_response_tokens)
        self._evaluator = self._make_evaluator(statuses)
        return PromptOrder(prompts.prompts, self._config.rollout.prompts_per_step, self._config.run.seed)

    def _lead(self, statuses: Statuses) -> None:
        """Takes the lease, and brings the models and the algorithm's own state to the last committed step."""
        newest = self._checkpoints.newest(self._run)
        seen = [status.leader_epoch for status in statuses.values()] + ([newest.leader_epoch] if newest else [])
        if self._lease is not None:
            self._lease.release()
            seen.append(self._lease.epoch)
        # A new epoch also for who led before: what it asked for may still be under way.
        self._lease = Lease(self._redis, self._url, self._run, at_least=1 + max(seen), owner=self._name)
        log.info("leading", epoch=self._epoch)
        self._board.update(phase="going to the last committed step")
        self._stream.reset(self._epoch)
        if self._evaluator is not None:
            self._evaluator.leader_epoch = self._epoch
        self._course = Course(self._config)
        recovery = Recovery(self._config, self._files, self._peers, self._experience, self._epoch)
        sealed = self._sealed.step if self._sealed else None
        step = recovery.to_last_commit(newest, statuses, self._course, sealed)
        self._saved, self._evaluated = newest.step if newest else 0, self._files.evaluated()
        self._abandon_checkpoint()
        if step < self._unsaved:
            self._unsaved = 0
        # What the guards found in the last step counts also where the run broke off before it was heeded.
        self._heed([alert for alert in self._course.found if asdict(alert) not in self._files.alerts_of(step)])
        self._experience.keep_only(range(self._saved + 1, step + 1))
        if step:
            self._board.note(f"going on after step {step}")
            log.info("resumed", step=step, checkpoint=self._saved)

    @property
    def _epoch(self) -> int:
        assert self._lease is not None
        return self._lease.epoch

    def _make_evaluator(self, statuses: Statuses) -> Evaluator | None:
        config = self._config
        if not config.evaluation.every:
            return None
        validation = read_validation_prompts(config, self._tokenizer, statuses[Role.ACTOR].vocabulary_size)
        for note in validation.notes:
            self._board.note(f"validation: {note}")
        longest = max(len(prompt.token_ids) for prompt in validation.prompts)
        check_lengths(statuses, longest, config.rollout.max_response_tokens)
        stream = RolloutStream(self._redis, self._url, stream_name(self._run))
        scoring = self._peers.scoring(with_critic=False)
        return Evaluator(
            config,
            self._peers.actor,
            stream,
            scoring,
            validation.prompts,
            self._tokenizer,
            self._files,
        )

    def _take_step(self, step: int, order: PromptOrder) -> list[Alert]:
        start = time.perf_counter()
        if self._sealed is None or self._sealed.step != step:
            self._sealed = self._prepare_step(step, order)
        collected, prepared = self._sealed.collected, self._sealed.prepared
        failpoint("orchestrator.sealing")
        with self._stopwatch.part("seal"):
            self._experience.seal(prepared.experience)
        failpoint("orchestrator.sealed")
        self._finish_checkpoint()
        self._board.update(phase="update")
        updating = time.perf_counter()
        updates = self._update(step)
        failpoint("orchestrator.updated")
        end = time.perf_counter()
        metrics = {
            "step": step,
            **prepared.metrics,
            "set_aside": len(collected.set_aside),
            **update_metrics(updates),
            **{
                f"learning_rate_{client.role}": learning_rate_at(self._config, self._trained(client.role), step)
                for client in self._peers.trained
            },
            "seconds": end - start,
            "seconds_generate": collected.seconds_generate,
            "seconds_score": collected.seconds_score,
            "seconds_update": end - updating,
        }
        if "entropy" in metrics:
            metrics["entropy_slope"] = self._course.entropy_slope(metrics["entropy"])
        self._commit(step, collected, prepared, metrics)
        self._sealed = None
        log.info("committed", step=step, seconds=time.perf_counter() - start, **self._stopwatch.lap())
        return self._course.commit(metrics, [item.score for item in collected.scored])

    def _prepare_step(self, step: int, order: PromptOrder) -> SealedStep:
        collected = self._generate_and_score(step, order)
        scores = [item.score for item in collected.scored]
        prepared = prepare_step(
            self._run,
            step,
            step - 1,
            collected.scored,
            self._config.algorithm,
            self._course.kl_coefficient,
            self._course.moments(scores),
            self._config.rollout.max_response_tokens,
        )
        return SealedStep(step, collected, prepared)

    def _generate_and_score(self, step: int, order: PromptOrder) -> CollectedStep:
        rollout = self._config.rollout
        prompts = order.of_step(step)
        samples = range(rollout.samples_per_prompt)
        expected = {TrajectoryId(self._run, step, prompt.index, sample) for prompt in prompts for sample in samples}
        self._board.update(phase="generate", scored=0, wanted=len(expected))
        generation = self._generate(step, prompts, 0, rollout.samples_per_prompt)
        fields = {prompt.index: prompt.fields for prompt in prompts} if self._config.reward.has_functions else {}

        def replace(wanted: set[int], sample: int) -> PendingResult[int]:
            return self._generate(step, [prompt for prompt in prompts if prompt.index in wanted], sample, 1)

        replacement = Replacement(self._config.recovery, replace)
        return self._collector.collect(expected, step - 1, generation, self._show_scored, fields, replacement)

    def _generate(self, step: int, prompts: Sequence[Prompt], first_sample: int, samples: int) -> PendingResult[int]:
        return self._peers.actor.generate(
            run=self._run,
            step=step,
            leader_epoch=self._epoch,
            prompts=prompts,
            samples_per_prompt=samples,
            sampling=run_sampling(self._config.rollout),
            seed=self._config.run.seed,
            policy_version=step - 1,
            first_sample=first_sample,
        )

    def _show_scored(self, scored: int) -> None:
        if self._board.current().scored != scored:
            self._board.update(scored=scored)

    def _trained(self, role: Role) -> TrainedModelConfig:
        return self._config.actor if role is Role.ACTOR else self._config.critic

    def _update(self, step: int) -> dict[Role, UpdateResult]:
        calls = {client.role: begin_update(client, self._config, step, self._epoch) for client in self._peers.trained}
        wait_for_all(list(calls.values()))
        return {role: call.result() for role, call in calls.items()}

    def _commit(self, step: int, collected: CollectedStep, prepared: PreparedStep, metrics: dict[str, float]) -> None:
        if self._lease is not None:
            with self._stopwatch.part("lease"):
                self._lease.check()
        try:
            with self._stopwatch.part("commit"):
                self._files.write_trajectories(step, trajectory_lines(self._tokenizer, collected, prepared))
                self._files.write_poison(step, poison_lines(self._tokenizer, collected))
                self._files.append_metrics(metrics)
        except OSError as error:
            raise StorageFailed(
                f"run directory {self._files.root}: step {step} cannot be written ({error.strerror}), so it does not count; "
                "mend that, then go on with --resume"
            ) from error
        self._attempts.progressed(step)
        failpoint("orchestrator.committed")
        with self._stopwatch.part("acknowledge"):
            self._stream.acknowledge(collected.entry_ids)
        failpoint("orchestrator.acknowledged")
        if self._config.checkpoint.every == 0:
            self._experience.discard([step])
        if collected.set_aside:
            self._board.note(poison_note(step, collected))
        self._board.commit(step, metrics)
        log.info("step", **{name: metrics[name] for name in ("step", "reward_mean", "kl_mean", "seconds")})

    def _raise_if_stopping(self) -> None:
        if self._control.stopping:
            raise Cancelled("stopped while waiting for the services")


def train(training: Training, board: ProgressBoard, finished: Callable[[int], None]) -> None:
    """Runs the training to its end, notes how it ended on the board, and passes its exit status on."""
    try:
        training.run()
    except Cancelled as error:
        board.update(state=RunState.STOPPED, phase="done", error=str(error))
        finished(0)
    except Exception as error:
        log.error("run failed", exc_info=error)
        code = 2 if isinstance(error, ConfigError) else 1
        board.update(state=RunState.FAILED, phase="failed", error=str(error) or type(error).__name__, exit_code=code)
        finished(code)
    else:
        finished(training.exit_code)
