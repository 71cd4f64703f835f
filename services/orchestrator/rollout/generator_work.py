"""The trajectories of one batch that a pool of generators generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.contract.work_split import by_expected_length
from quartet.errors import QuartetError

if TYPE_CHECKING:
    from quartet.services.orchestrator.rollout.generator_members import Member
    from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool


@dataclass(frozen=True, slots=True)
class Attempt:
    """A Generate call: the address of its generator, and its trajectories."""

    address: str
    requests: list[GenerationRequest]


class Work:
    """The trajectories of one batch: those that wait for a generator, and those that have arrived."""

    def __init__(self, pool: GeneratorPool, batch: GenerationBatch, by_rule: bool) -> None:
        self.pool, self.batch, self.by_rule = pool, batch, by_rule
        self.waiting = list(batch.requests) if by_rule else by_expected_length(batch.requests)
        self.shares: dict[Member, list[GenerationRequest]] | None = None
        self.seen: set[TrajectoryId] = set()
        self.context = copy_context()
        """Context of the thread that started the work. Its calls belong to the trace of the step that was current there."""
        self.attempts: dict[int, Attempt] = {}
        """Generate calls that are in flight or have ended well. Trajectories of all others are abandoned."""
        self.failed: dict[Member, QuartetError] = {}
        """Generators that have failed at this work, although they respond. They get no more of it."""
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

    def abandoned(self, trajectory: Trajectory) -> bool:
        """See ``PendingTrajectories``."""
        return self.pool.was_started(trajectory.attempt) and trajectory.attempt not in self.attempts

    def wrong_origin(self, trajectory: Trajectory) -> str:
        """See ``PendingTrajectories``."""
        attempt = self.attempts.get(trajectory.attempt)
        if attempt is None:
            return (
                f"generator {trajectory.generator or 'none'}: {trajectory.id} names attempt {trajectory.attempt}, which this run "
                "has not started; start the generators with the same version of Quartet"
            )
        if trajectory.generator != attempt.address:
            return (
                f"generator {attempt.address}: {trajectory.id} names the generator {trajectory.generator or 'none'}; expected "
                "the address at which it was called"
            )
        return ""

    @property
    def collected(self) -> bool:
        """True if all trajectories have arrived."""
        return all(request.id in self.seen for request in self.batch.requests)

    def abandon_all_of(self, address: str) -> None:
        """Abandon all Generate calls of a generator. Reopen the work if it has ended and trajectories are missing now."""
        for number in [number for number, attempt in self.attempts.items() if attempt.address == address]:
            self.abandon(number)
        if self.waiting and self.done():
            self.reopen()

    def abandon(self, attempt: int) -> None:
        """Wait for the trajectories of a Generate call again, unless they have arrived. Does nothing for an unknown attempt."""
        if attempt in self.attempts:
            self.wait_again_for(self.attempts.pop(attempt).requests)

    def wait_again_for(self, requests: Sequence[GenerationRequest]) -> None:
        """Put requests back, unless their trajectories have arrived."""
        self.waiting += [request for request in requests if request.id not in self.seen]

    def arrived(self, trajectory: Trajectory) -> bool:
        """See ``PendingTrajectories``."""
        return self.pool.arrived(self, trajectory)

    def used_of(self, address: str) -> bool:
        """Return whether a trajectory that a generator has generated has arrived."""
        attempts = [attempt for attempt in self.attempts.values() if attempt.address == address]
        return any(request.id in self.seen for attempt in attempts for request in attempt.requests)

    def newer_weights(self) -> Mapping[int, bytes]:
        """See ``PendingTrajectories``."""
        return self.pool.newer_weights(self)

    def refuse(self, trajectory: Trajectory, reason: str) -> None:
        """See ``PendingTrajectories``."""
        self.pool.refuse(self, trajectory, reason)

    def error_of_all(self) -> QuartetError:
        """Return one error for those of all generators that have failed at this work."""
        first, *others = self.failed.values()
        return type(first)("; ".join(map(str, (first, *others)))) if others else first

    def end(self, error: QuartetError | None) -> None:
        """End the work. ``error`` is its failure."""
        self._error = error
        self._ended.set()
        for callback in [*self._callbacks]:
            callback()

    def reopen(self) -> None:
        """Continue after the end."""
        self._ended.clear()
