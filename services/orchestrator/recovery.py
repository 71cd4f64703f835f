"""The way back to the last committed step: checkpoint, then replay of the sealed experience; or regeneration where it is lost."""

from __future__ import annotations

import structlog

from quartet.buffer.experience import ExperienceStore
from quartet.checkpoints import Checkpoint
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
from quartet.telemetry.run_files import RunFiles
from quartet.types import ServiceStatus
from services.orchestrator.collector import wait_for_all
from services.orchestrator.course import Course
from services.orchestrator.peers import Peers, Statuses
from services.orchestrator.settings import begin_update

log = structlog.get_logger()


RECOVERABLE = (ServiceUnavailable, ServiceFailed, ServiceBusy, BufferFailed, FailedPrecondition)
"""What a service or a buffer that went away, came back or broke down makes a call fail with. Anything else fails again."""

LONGEST_PAUSE = 30.0
"""Seconds before a further attempt."""


class Attempts:
    """How often a run has failed without getting any further."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._failures = self._furthest = 0

    def progressed(self, step: int) -> None:
        """A step was committed: one that was not before lets the count begin anew."""
        if step > self._furthest:
            self._furthest, self._failures = step, 0

    def pause_after(self, error: QuartetError) -> float:
        """Seconds to wait before the next attempt. Raises ``error``, with how often it was tried, when there is to be none."""
        if self._failures == self._config.attempts:
            if not self._failures:
                raise error
            raise type(error)(
                f"gave up after {self._failures} recoveries in a row without a further step; the last failure: {error}"
            ) from error
        self._failures += 1
        return min(LONGEST_PAUSE, self._config.backoff * 2.0 ** (self._failures - 1))


class Recovery:
    """Brings models, optimizers and the algorithm's own state to the same step."""

    def __init__(
        self, config: Config, files: RunFiles, peers: Peers, experience: ExperienceStore, leader_epoch: int
    ) -> None:
        self._config, self._files, self._peers = config, files, peers
        self._experience, self._epoch = experience, leader_epoch

    def to_last_commit(
        self, checkpoint: Checkpoint | None, statuses: Statuses, course: Course, sealed: int | None = None
    ) -> int:
        """Goes to the last committed step, or, where the buffer has lost what leads there, back to the checkpoint's.

        What came after that step is forgotten: the same seeds bring the same again. A model that has applied ``sealed``, the step
        that is about to be committed, may stay there. ``course`` is as before the first step. Gives the step. Raises ConfigError
        when the run's files are damaged.
        """
        base = checkpoint.step if checkpoint else 0
        history = self._files.committed()
        last = len(history)
        if last < base:
            raise ConfigError(
                f"metrics {self._files.metrics}: end at step {last}, the newest checkpoint is of step {base}; put the file back, "
                "or start the run anew"
            )
        if not self._experience.holds(range(base + 1, last + 1)):
            log.warning("sealed experience is lost; its steps are taken again", first=base + 1, last=last)
            last = base
        self._files.forget_after(last)
        history = history[:last]
        course.restore(base, checkpoint.state if checkpoint else None, history[:base])
        for metrics in history[base:]:
            course.commit(metrics, self._files.scores(int(metrics["step"])))
        applied = last + 1 if sealed == last + 1 else last
        for client in self._peers.trained:
            self._bring(client, statuses[client.role], checkpoint, base, last, applied)
        return last

    def _bring(
        self,
        client: ActorClient | CriticClient,
        status: ServiceStatus,
        checkpoint: Checkpoint | None,
        base: int,
        last: int,
        applied: int,
    ) -> None:
        """One model to step ``last``: as it stands where it is on the way, or at ``applied``; from the checkpoint otherwise."""
        run, step = self._config.run.name, status.step
        fresh = status.policy_version == 0 and base == 0
        if status.broken or (not fresh and not (status.run == run and base <= step <= applied)):
            directory = (
                f"{checkpoint.path.relative_to(self._files.root).as_posix()}/{client.role}" if checkpoint else ""
            )
            restoring = client.restore(run, base, self._epoch, directory)
            wait_for_all([restoring])
            step = base
        for replay in range(step + 1, last + 1):
            try:
                wait_for_all([begin_update(client, self._config, replay, self._epoch)])
            except BufferFailed:
                # Damaged is as good as lost: the next attempt takes the steps again.
                self._experience.discard([replay])
                raise
