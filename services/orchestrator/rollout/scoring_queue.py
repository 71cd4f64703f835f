"""Calls of one step at one scoring service: batches in flight, retries, and the trajectories that are given up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quartet.config.deployment import RecoveryConfig
from quartet.contract.trajectory import Outcome, TokenBatch, Trajectory
from quartet.errors import (
    ComputationFailed,
    InvalidRequest,
    NoResponse,
    QuartetError,
    ScorerFailed,
    ServiceFailed,
)

TRAJECTORY_FAULTS = (ComputationFailed, ServiceFailed, InvalidRequest)
"""Errors that a trajectory may cause, except ``NoResponse``. Any other error, such as OutOfMemory, is raised at once."""
PREFETCH = 2
"""Batches in flight per service beyond two per replica: one that it computes, and one that waits there."""
BATCH_ATTEMPTS = 2
"""Attempts for a whole batch before its trajectories are sent one by one, so that a transient fault does not change the bits."""


@dataclass(frozen=True, slots=True)
class FailedTrajectory:
    """A trajectory that a service could not score, with the number of attempts and the last error.

    ``error`` may quote the response. ``fault`` is its class, which reveals nothing of the response; ScorerFailed for an outcome
    that the reward source reported.
    """

    trajectory: Trajectory
    attempts: int
    error: str
    fault: type[QuartetError]
    outcome: Outcome = Outcome.SCORER_ERROR

    @property
    def cause(self) -> str:
        """The error for logs and notes: its text if that quotes no response or the config allows it, otherwise its class."""
        return self.error if issubclass(self.fault, ScorerFailed) else self.fault.__name__


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt to score one trajectory that failed: the outcome, and the error with its class."""

    outcome: Outcome
    error: str
    fault: type[QuartetError]


StartCall = Callable[[Sequence[Trajectory], TokenBatch], Future[Any]]
"""Function that sends trajectories to one service. The batch holds their tokens."""
SplitResult = Callable[[Any, Sequence[Trajectory]], list[Any]]
"""Function that splits the result of a service into one entry per trajectory."""


def max_batches_in_flight(replicas: int) -> int:
    """Return the maximum number of batches in flight for a service. More batches would not be scored sooner."""
    return 2 * replicas + PREFETCH


class BatchCall:
    """The calls of one batch at one service. ``results`` has an entry per trajectory: its result, or a FailedTrajectory."""

    def __init__(self, queue: ServiceQueue, trajectories: Sequence[Trajectory], batch: TokenBatch) -> None:
        self.results: list[Any] = [None] * len(trajectories)
        self._queue, self._trajectories = queue, trajectories
        self._sent = range(len(trajectories))
        """Trajectories of the current call: all of them, or one. Those that have a result keep it."""
        self._failures = self._batch_failures = 0
        self._faulty: set[int] = set()
        """Trajectories for which an attempt failed."""
        self._unhandled: list[Any] | None = None
        self._retry: range | None = None
        """Trajectories to send again at ``_retry_at``, on the queue's clock. Set after the current call has failed."""
        self._retry_at = 0.0
        self._unsent_batch: TokenBatch | None = batch
        self._call: Future[Any] | None = None

    @property
    def ended(self) -> bool:
        """True if every trajectory has a result."""
        return self._call is None and self._unsent_batch is None

    @property
    def retry_at(self) -> float | None:
        """Time of the pending retry on the queue's clock, or None."""
        return self._retry_at if self._retry is not None else None

    def start(self) -> None:
        """Send the whole batch."""
        assert self._unsent_batch is not None
        self._call, self._unsent_batch = self._queue.start_call(self._trajectories, self._unsent_batch), None

    def advance(self, may_retry: bool) -> None:
        """Process the response if it has arrived. A failure is handled only with ``may_retry``."""
        if self._retry is not None:
            if self._queue.clock() < self._retry_at:
                return
            self._send(self._retry)
        while self._retry is None and self._call is not None and self._call.done():
            results, self._unhandled = self._unhandled or self._results(), None
            recovery = self._queue.recovery
            if recovery is None or not any(isinstance(result, Failure) for result in results):
                self._keep(results)
                self._continue()
            elif not may_retry:
                self._unhandled = results
                return
            else:
                self._handle_failures(results, recovery)

    def cancel(self) -> None:
        """Cancel the current call."""
        if self._call is not None:
            self._call.cancel()

    def _results(self) -> list[Any]:
        """Return the results of the current call, with a Failure for each trajectory without one.

        Raises the error if no trajectory causes it, and any error if nothing is retried.
        """
        assert self._call is not None
        sent = self._trajectories[self._sent.start : self._sent.stop]
        try:
            results = self._queue.split_result(self._call.result(), sent)
        except TRAJECTORY_FAULTS as error:
            if self._queue.recovery is None or isinstance(error, NoResponse):
                raise _naming_batch(error, sent) from None
            return [Failure(Outcome.SCORER_ERROR, str(error), type(error))] * len(sent)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures and self._queue.recovery is None:
            raise _naming_batch(ScorerFailed(failures[0].error), sent)
        return results

    def _send(self, indices: range) -> None:
        self._sent, self._retry = indices, None
        sent = self._trajectories[indices.start : indices.stop]
        self._call = self._queue.start_call(sent, TokenBatch.of(sent))

    def _keep(self, results: list[Any]) -> None:
        """Keep the results of trajectories that have none yet."""
        for index, result in zip(self._sent, results, strict=True):
            if self.results[index] is None and not isinstance(result, Failure):
                self.results[index] = result
                self._queue.cured_faults += index in self._faulty

    def _continue(self) -> None:
        """Send the next trajectory without a result, or end."""
        missing = self._first_missing()
        if missing is not None:
            self._failures = self._batch_failures
            self._send(range(missing, missing + 1))
        else:
            self._call = None
            self._check_service()

    def _handle_failures(self, results: list[Any], recovery: RecoveryConfig) -> None:
        """Give up the trajectories that get no further attempt, and retry the other failed ones."""
        self._keep(results)
        self._faulty |= {
            index for index, result in zip(self._sent, results, strict=True) if isinstance(result, Failure)
        }
        self._failures += 1
        for index, result in zip(self._sent, results, strict=True):
            # An error of the whole call may be the fault of one trajectory. The others are not given up with it.
            at_fault = self.results[index] is None and (len(results) == 1 or result.fault is ScorerFailed)
            if at_fault and self._failures >= recovery.max_attempts(result.outcome):
                self._give_up(index, result)
        missing = self._first_missing()
        if missing is None or (len(results) == 1 and missing != self._sent.start):
            self._continue()
        elif len(results) == 1:
            self._retry_later(self._sent, recovery)
        else:
            split = self._failures >= min(BATCH_ATTEMPTS, recovery.max_scoring_attempts - 1)
            self._batch_failures = self._failures
            self._retry_later(range(missing, missing + 1) if split else self._sent, recovery)

    def _first_missing(self) -> int | None:
        return next((index for index, result in enumerate(self.results) if result is None), None)

    def _give_up(self, index: int, failure: Failure) -> None:
        failed = FailedTrajectory(
            self._trajectories[index], self._failures, failure.error, failure.fault, failure.outcome
        )
        self._queue.on_failure(failed)
        self.results[index] = failed

    def _retry_later(self, indices: range, recovery: RecoveryConfig) -> None:
        self._retry, self._retry_at = indices, self._queue.clock() + recovery.pause(self._failures)

    def _check_service(self) -> None:
        """Raise ServiceFailed if the service failed for each of several prompts: then no prompt is at fault."""
        if len({item.id.prompt for item in self._trajectories}) > 1 and all(
            isinstance(result, FailedTrajectory) and result.fault is ServiceFailed for result in self.results
        ):
            raise _naming_batch(ServiceFailed(self.results[-1].error), self._trajectories)


class ServiceQueue:
    """Batches of one step at one service. Failed batches are retried in order, one at a time, so timing decides nothing."""

    def __init__(
        self,
        send: StartCall,
        split_result: SplitResult,
        replicas: int,
        recovery: RecoveryConfig | None,
        on_failure: Callable[[FailedTrajectory], None],
        on_response: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Without ``recovery`` the first failure is raised. ``clock`` is in seconds.

        ``on_failure`` receives each trajectory that could not be scored. ``on_response`` is called on another thread when a
        response arrives.
        """
        self._send_call, self.split_result, self.recovery, self.on_failure = send, split_result, recovery, on_failure
        self.clock = clock
        self.cured_faults = 0
        """Number of trajectories for which a further attempt succeeded."""
        self._max_in_flight = max_batches_in_flight(replicas)
        self._waiting: deque[BatchCall] = deque()
        self._in_flight: list[BatchCall] = []
        self._response_arrived = threading.Event()
        self._on_response = on_response

    def add(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> BatchCall:
        """Send a batch as soon as the service has room for it."""
        batch_call = BatchCall(self, trajectories, batch)
        self._waiting.append(batch_call)
        self._send_waiting()
        return batch_call

    def start_call(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Future[Any]:
        """Start one call."""
        call = self._send_call(trajectories, batch)
        call.add_done_callback(lambda _: self._notify())
        return call

    def advance(self) -> bool:
        """Process the responses that have arrived, and return whether any could have.

        Raises the error of any batch if no trajectory causes it.
        """
        if not self._response_arrived.is_set() and self.retry_at is None:
            return False
        self._response_arrived.clear()
        may_retry = True
        for batch_call in self._in_flight:
            batch_call.advance(may_retry)
            may_retry = may_retry and batch_call.ended
        self._in_flight = [batch_call for batch_call in self._in_flight if not batch_call.ended]
        self._send_waiting()
        return True

    @property
    def retry_at(self) -> float | None:
        """Time of the earliest pending retry on the clock, or None."""
        times = [batch_call.retry_at for batch_call in self._in_flight if batch_call.retry_at is not None]
        return min(times, default=None)

    def cancel(self) -> None:
        """Cancel every call."""
        for batch_call in self._in_flight:
            batch_call.cancel()

    def _notify(self) -> None:
        self._response_arrived.set()
        self._on_response()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            batch_call = self._waiting.popleft()
            batch_call.start()
            self._in_flight.append(batch_call)


def _naming_batch(error: QuartetError, trajectories: Sequence[Trajectory]) -> QuartetError:
    """Return the error with the ids of the batch, because the service knows only their indices."""
    ids = ", ".join(str(trajectory.id) for trajectory in trajectories)
    return type(error)(f"{error}; the batch, from index 0 (run/step/prompt line from 0/sample): {ids}")
