"""The trajectories of one batch that a pool of generators generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING

from quartet.errors import QuartetError
from quartet.services.orchestrator.rollout.work_split import by_expected_length
from quartet.types import GenerationBatch, GenerationRequest, Trajectory, TrajectoryId

if TYPE_CHECKING:
    from quartet.services.orchestrator.rollout.generator_members import Member
    from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool


class Work:
    """The trajectories of one batch: those that wait for a generator, and those that have arrived."""

    def __init__(self, pool: GeneratorPool, batch: GenerationBatch, by_rule: bool) -> None:
        self.pool, self.batch, self.by_rule = pool, batch, by_rule
        self.waiting = list(batch.requests) if by_rule else by_expected_length(batch.requests)
        self.shares: dict[Member, list[GenerationRequest]] | None = None
        self.seen: set[TrajectoryId] = set()
        self.context = copy_context()
        """Context of the thread that started the work. Its calls belong to the trace of the step that was current there."""
        self._ended = threading.Event()
        self._error: QuartetError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """See ``PendingTrajectories``."""
        return self._ended.is_set()

    def when_done(self, callback: Callable[[], None]) -> None:
        """See ``PendingTrajectories``. A refused trajectory continues the work, which then ends again."""
        self._callbacks.append(callback)
        if self.done():
            callback()

    def result(self) -> int:
        """See ``PendingTrajectories``."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return len(self.batch.requests)

    def cancel(self) -> None:
        """See ``PendingTrajectories``."""
        self.pool.cancel(self)

    def arrived(self, trajectory: Trajectory) -> None:
        """See ``PendingTrajectories``."""
        self.seen.add(trajectory.id)

    def newer_weights(self) -> Mapping[int, bytes]:
        """See ``PendingTrajectories``."""
        return self.pool.newer_weights(self)

    def refuse(self, trajectory: Trajectory, reason: str) -> None:
        """See ``PendingTrajectories``."""
        self.pool.refuse(self, trajectory, reason)

    def end(self, error: QuartetError | None) -> None:
        """End the work. ``error`` is its failure."""
        self._error = error
        self._ended.set()
        for callback in [*self._callbacks]:
            callback()

    def reopen(self) -> None:
        """Continue after the end."""
        self._ended.clear()
