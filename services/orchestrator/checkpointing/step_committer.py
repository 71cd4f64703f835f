"""Commit of a step: its experience is sealed in the buffer before the update, its metrics are written to files after."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import structlog

from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.step_artifacts import (
    StepRecord,
    failed_trajectories_note,
    failed_trajectory_rows,
    step_record,
)
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from quartet.services.orchestrator.rollout.step_preparation import PendingStep
from quartet.services.orchestrator.telemetry.run_outputs import RunTelemetry
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from quartet.system.failpoints import failpoint

log = structlog.get_logger()


class StepCommitter:
    """Writer of a run's steps to the buffer and to the run's files."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        files: RunFiles,
        stream: RolloutStream,
        experience: ExperienceStore,
        telemetry: RunTelemetry,
        board: ProgressBoard,
        profiler: StepProfiler,
    ) -> None:
        """``tokenizer`` decodes the responses."""
        self._config, self._tokenizer, self._files = config, tokenizer, files
        self._stream, self._experience = stream, experience
        self._telemetry, self._board, self._profiler = telemetry, board, profiler

    def seal(self, pending: PendingStep) -> None:
        """Write the experience to the buffer. From here on, any leader can replay the step."""
        failpoint("orchestrator.sealing")
        with self._profiler.span("redis", "seal"):
            self._experience.seal(pending.prepared.experience)
        failpoint("orchestrator.sealed")

    def record(self, pending: PendingStep) -> StepRecord:
        """Return the diagnostics of the step's responses."""
        return step_record(self._tokenizer, pending.collected, pending.prepared, pending.prompt_sets)

    def write_failed_trajectories(
        self, step: int, trajectories: Sequence[FailedTrajectory], skipped_prompts: Collection[int] = ()
    ) -> None:
        """Write the trajectories of ``step`` that could not be scored. ``skipped_prompts``: see ``CollectedStep``."""
        rows = failed_trajectory_rows(self._tokenizer, trajectories, skipped_prompts)
        self._files.write_failed_trajectories(step, rows)

    def commit(self, step: int, pending: PendingStep, record: StepRecord, metrics: dict[str, float]) -> None:
        """Write the step to the run's files. The step is committed once its line of metrics is on disk."""
        with self._profiler.span(Role.ORCHESTRATOR, "commit"):
            self._telemetry.write_tokens(step, pending.prepared)
            self._files.write_trajectories(step, record.rows)
            collected = pending.collected
            self.write_failed_trajectories(step, collected.failed_trajectories, collected.skipped_prompts)
            self._files.append_metrics(metrics)

    def clean_up(self, step: int, pending: PendingStep, metrics: dict[str, float]) -> None:
        """Publish the progress of a committed step, and free its entries in the buffer."""
        collected = pending.collected
        self._board.commit(step, metrics)
        failpoint("orchestrator.committed")
        with self._profiler.span("redis", "acknowledge"):
            self._stream.acknowledge(collected.entry_ids)
        failpoint("orchestrator.acknowledged")
        if self._config.checkpoint.every_steps == 0:
            self._experience.discard([step])
        if collected.failed_trajectories:
            self._board.note(failed_trajectories_note(step, collected))

    def report(self, step: int, metrics: dict[str, float], started: float) -> None:
        """Pass a committed step to telemetry and log. ``started`` is the step's start by ``time.perf_counter``."""
        self._telemetry.committed(step, started, metrics)
        log.info(
            "step committed",
            step=step,
            **{name: metrics[name] for name in ("reward_mean",) if name in metrics},
            kl_mean=metrics["kl_mean"],
            seconds=time.perf_counter() - started,
            **self._profiler.take_seconds(),
        )
