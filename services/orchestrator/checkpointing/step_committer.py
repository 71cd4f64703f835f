"""Where a step is written down: sealed in the buffer before the models learn from it, committed to the run's files after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog

from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config
from quartet.failpoints import failpoint
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.step_artifacts import (
    StepRecord,
    failed_trajectories_note,
    failed_trajectory_lines,
    step_record,
)
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.preparation import SealedStep
from quartet.services.orchestrator.rollout.scoring import FailedTrajectory
from quartet.services.orchestrator.telemetry.run_telemetry import Telemetry
from quartet.services.orchestrator.telemetry.stopwatch import Stopwatch
from quartet.types import Role

log = structlog.get_logger()


class StepCommitter:
    """What there is of a run's steps, in the buffer and in its files."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        files: RunFiles,
        stream: RolloutStream,
        experience: ExperienceStore,
        telemetry: Telemetry,
        board: ProgressBoard,
        stopwatch: Stopwatch,
    ) -> None:
        """``tokenizer`` makes text of the responses."""
        self._config, self._tokenizer, self._files = config, tokenizer, files
        self._stream, self._experience = stream, experience
        self._telemetry, self._board, self._stopwatch = telemetry, board, stopwatch
        self._timeline = telemetry.timeline

    def seal(self, sealed: SealedStep) -> None:
        """Puts the experience into the buffer: the step can be taken from there on by whoever leads."""
        failpoint("orchestrator.sealing")
        with self._stopwatch.part("seal"), self._timeline.part("redis", "seal"):
            self._experience.seal(sealed.prepared.experience)
        failpoint("orchestrator.sealed")

    def record(self, sealed: SealedStep) -> StepRecord:
        """What will be written down of the step's responses."""
        return step_record(self._tokenizer, sealed.collected, sealed.prepared)

    def failed_trajectories(self, step: int, trajectories: Sequence[FailedTrajectory]) -> None:
        """Writes down the trajectories of ``step`` that could not be scored."""
        self._files.write_failed_trajectories(step, failed_trajectory_lines(self._tokenizer, trajectories))

    def write(self, step: int, sealed: SealedStep, record: StepRecord, metrics: dict[str, float]) -> None:
        """Commits the step: with its line of metrics it is done, whatever happens next."""
        with self._stopwatch.part("commit"), self._timeline.part(Role.ORCHESTRATOR, "commit"):
            self._telemetry.keep_tokens(step, sealed.prepared)
            self._files.write_trajectories(step, record.lines)
            self.failed_trajectories(step, sealed.collected.failed_trajectories)
            self._files.append_metrics(metrics)

    def settle(self, step: int, sealed: SealedStep, metrics: dict[str, float]) -> None:
        """Shows that the step is committed, and lets go of what only led there."""
        collected = sealed.collected
        self._board.commit(step, metrics)
        failpoint("orchestrator.committed")
        with self._stopwatch.part("acknowledge"), self._timeline.part("redis", "acknowledge"):
            self._stream.acknowledge(collected.entry_ids)
        failpoint("orchestrator.acknowledged")
        if self._config.checkpoint.every_steps == 0:
            self._experience.discard([step])
        if collected.failed_trajectories:
            self._board.note(failed_trajectories_note(step, collected))
        log.info("step", **{name: metrics[name] for name in ("step", "reward_mean", "kl_mean", "seconds")})

    def tell(self, step: int, metrics: dict[str, float], started: float) -> None:
        """Tells of a committed step, and of the time since ``started``, by the timeline's clock."""
        self._telemetry.committed(step, started, metrics)
        log.info("committed", step=step, seconds=time.perf_counter() - started, **self._stopwatch.lap())
