"""Scoring of a step by several services at once. Failed batches are retried, then split. Trajectories that still fail are
reported.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog

from quartet.config import RecoveryConfig
from quartet.errors import (
    ComputationFailed,
    FunctionFailed,
    InvalidRequest,
    NoResponse,
    QuartetError,
    ServiceFailed,
    TooManyFailedTrajectories,
)
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.rpc.pending_calls import PendingResult
from quartet.services.orchestrator.rollout.replicas import RewardReplicas
from quartet.services.orchestrator.rollout.verification import FirstTrajectories
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call
from quartet.types import FloatArray, Role, SamplingParameters, Scores, TokenBatch, Trajectory, TrajectoryId

log = structlog.get_logger()

TRAJECTORY_FAULTS = (ComputationFailed, ServiceFailed, InvalidRequest)
"""Errors that a trajectory may cause, except ``NoResponse``. Any other error, such as OutOfMemory, is raised at once."""
PREFETCH = 2
"""Batches in flight per service beyond two per replica: one that it computes, and one that waits there."""
BATCH_ATTEMPTS = 2
"""Attempts for a whole batch before its trajectories are sent one by one, so that a transient fault does not change the bits."""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with the results of the scoring services.

    ``score`` in units of reward, with ``parts`` by name if it is a weighted sum. ``reference_log_probs`` and ``values`` are
    float32 [response tokens]; values are 0 without a critic.
    """

    trajectory: Trajectory
    score: float
    reference_log_probs: FloatArray
    values: FloatArray
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailedTrajectory:
    """A trajectory that a service could not score, with the number of attempts and the last error.

    ``error`` may quote the response. ``fault`` is its class, which reveals nothing of the response.
    """

    trajectory: Trajectory
    attempts: int
    error: str
    fault: type[QuartetError]

    @property
    def cause(self) -> str:
        """The error for logs and notes: its text if that quotes no response or the config allows it, otherwise its class."""
        return self.error if self.fault is FunctionFailed else self.fault.__name__


class ReferencePolicy(Protocol):
    """Source of the initial policy's log-probs: a reference service, or an actor with its adapter off."""

    role: Role

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Start to compute log-probs, float32 [response tokens]."""

    def replicas(self) -> int:
        """Return the number of processes that share the calls."""


class ActorAsReference:
    """The actor with its LoRA adapter off, used as the reference."""

    role = Role.ACTOR

    def __init__(self, actor: ActorClient) -> None:
        self._actor = actor

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Start to compute log-probs, float32 [response tokens]. The actor first finishes the current generation."""
        return self._actor.reference_log_probs(batch, temperature)

    def replicas(self) -> int:
        """Return 1: there is a single policy."""
        return 1


@dataclass(frozen=True, slots=True)
class ScoringServices:
    """The services that score a batch: reward, reference and, if any, critic. ``temperature`` is that of the rollouts.

    ``actor``, whose parameters are of ``dtype``, computes the log-probs of responses whose engine reports none, and verifies
    those that generators report.
    """

    reward: RewardReplicas
    reference: ReferencePolicy
    critic: CriticClient | None
    temperature: float
    actor: ActorClient | None = None
    dtype: str = "float32"

    def first_trajectories(self, sampling: SamplingParameters, on_response: Callable[[], None]) -> FirstTrajectories:
        """Return the check of the generators of one step."""
        return FirstTrajectories(self.actor, sampling.temperature or 1.0, self.dtype, on_response)

    def policy_log_probs(self, batch: TokenBatch) -> FloatArray:
        """Return log-probs under the current policy, float32 [response tokens]. Waits for the actor."""
        assert self.actor is not None
        return self.actor.log_probs(batch, self.temperature)


StartCall = Callable[[Sequence[Trajectory], TokenBatch], PendingResult[Any]]
"""Function that sends trajectories to one service. The batch holds their tokens."""
SplitResult = Callable[[Any, Sequence[Trajectory]], list[Any]]
"""Function that splits the result of a service into one entry per trajectory."""


def max_batches_in_flight(replicas: int) -> int:
    """Return the maximum number of batches in flight for a service. More batches would not be scored sooner."""
    return 2 * replicas + PREFETCH


class _BatchCall:
    """The calls of one batch at one service. ``results`` has an entry per trajectory: its result, or a FailedTrajectory."""

    def __init__(self, queue: _ServiceQueue, trajectories: Sequence[Trajectory], batch: TokenBatch) -> None:
        self.results: list[Any] = [None] * len(trajectories)
        self._queue, self._trajectories = queue, trajectories
        self._indices = range(len(trajectories))
        """Trajectories of the current call: all of them, or one."""
        self._failures = self._batch_failures = 0
        self._retry: range | None = None
        """Trajectories to send again at ``_retry_at``, on the queue's clock. Set after the current call has failed."""
        self._retry_at = 0.0
        self._unsent_batch: TokenBatch | None = batch
        self._call: PendingResult[Any] | None = None

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
        """Process the response if it has arrived. A failed call is retried only with ``may_retry``."""
        if self._retry is not None:
            if self._queue.clock() < self._retry_at:
                return
            self._send(self._retry)
        while self._retry is None and self._call is not None and self._call.done():
            sent = self._sent()
            try:
                results = self._queue.split_result(self._call.result(), sent)
            except TRAJECTORY_FAULTS as error:
                if self._queue.recovery is None or isinstance(error, NoResponse):
                    raise _naming_batch(error, sent) from None
                if not may_retry:
                    return
                self._schedule_retry(error, self._queue.recovery)
            else:
                self._store(results)

    def cancel(self) -> None:
        """Cancel the current call."""
        if self._call is not None:
            self._call.cancel()

    def _sent(self) -> Sequence[Trajectory]:
        return self._trajectories[self._indices.start : self._indices.stop]

    def _send(self, indices: range) -> None:
        self._indices, self._retry = indices, None
        self._call = self._queue.start_call(self._sent(), TokenBatch.of(self._sent()))

    def _store(self, results: list[Any]) -> None:
        end = self._indices.stop
        self.results[self._indices.start : end] = results
        if end == len(self._trajectories):
            self._call = None
            self._check_service()
        else:
            self._failures = self._batch_failures
            self._send(range(end, end + 1))

    def _schedule_retry(self, error: QuartetError, recovery: RecoveryConfig) -> None:
        self._failures += 1
        if len(self._indices) > 1:
            split = self._failures >= min(BATCH_ATTEMPTS, recovery.max_scoring_attempts - 1)
            self._batch_failures = self._failures
            self._retry_later(range(1) if split else self._indices, recovery)
        elif self._failures < recovery.max_scoring_attempts:
            self._retry_later(self._indices, recovery)
        else:
            failed = FailedTrajectory(self._sent()[0], self._failures, str(error), type(error))
            self._queue.on_failure(failed)
            self._store([failed])

    def _retry_later(self, indices: range, recovery: RecoveryConfig) -> None:
        self._retry, self._retry_at = indices, self._queue.clock() + recovery.pause(self._failures)

    def _check_service(self) -> None:
        """Raise ServiceFailed if the service failed for each of several trajectories: then no trajectory is at fault."""
        if len(self.results) > 1 and all(
            isinstance(result, FailedTrajectory) and result.fault is ServiceFailed for result in self.results
        ):
            raise _naming_batch(ServiceFailed(self.results[-1].error), self._trajectories)


class _ServiceQueue:
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
        self._max_in_flight = max_batches_in_flight(replicas)
        self._waiting: deque[_BatchCall] = deque()
        self._in_flight: list[_BatchCall] = []
        self._response_arrived = threading.Event()
        self._on_response = on_response

    def add(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> _BatchCall:
        """Send a batch as soon as the service has room for it."""
        batch_call = _BatchCall(self, trajectories, batch)
        self._waiting.append(batch_call)
        self._send_waiting()
        return batch_call

    def start_call(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[Any]:
        """Start one call."""
        call = self._send_call(trajectories, batch)
        call.when_done(self._notify)
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


class Scoring:
    """Scoring of one step's trajectories, batch by batch.

    ``scored`` and ``failed_trajectories`` cover the batches that have ended. If several services fail for a trajectory, the first
    one counts.
    """

    def __init__(
        self,
        services: ScoringServices,
        fields: Mapping[int, str],
        recovery: RecoveryConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: CallObserver = ignore_call,
        on_response: Callable[[], None] = lambda: None,
    ) -> None:
        """``fields`` are the prompts' own fields by prompt index, for reward functions. ``observe`` receives every call.

        ``recovery`` limits the attempts and the failed trajectories, and sets the pauses by ``clock`` (seconds). Without it, any
        failure is raised. ``on_response`` is called on another thread when a response arrives.
        """
        self.scored: list[ScoredTrajectory] = []
        self.failed_trajectories: list[FailedTrajectory] = []
        self._recovery, self._clock = recovery, clock
        self._failed: dict[TrajectoryId, FailedTrajectory] = {}
        self._batches: list[_Batch] = []

        def request_scores(trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[Scores]:
            call = services.reward.score(batch, [fields[item.id.prompt] for item in trajectories] if fields else [])
            observe(Role.REWARD, "score", call)
            return call

        def request_log_probs(_: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[FloatArray]:
            call = services.reference.log_probs(batch, services.temperature)
            observe(services.reference.role, "log_probs", call)
            return call

        def request_values(trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[FloatArray]:
            assert services.critic is not None
            # The critic has learned from all earlier steps, even if an older policy generated this one.
            call = services.critic.values(batch, trajectories[0].id.step - 1)
            observe(Role.CRITIC, "values", call)
            return call

        def queue(send: StartCall, split_result: SplitResult, replicas: int) -> _ServiceQueue:
            return _ServiceQueue(send, split_result, replicas, recovery, self._record_failure, on_response, clock)

        self._reward = queue(request_scores, _split_scores, services.reward.replicas())
        self._reference = queue(request_log_probs, _split_tokens, services.reference.replicas())
        self._critic = queue(request_values, _split_tokens, services.critic.replicas()) if services.critic else None

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Send one ragged batch to all services, to each as soon as it has room for it."""
        batch = TokenBatch.of(trajectories)
        scores, log_probs = self._reward.add(trajectories, batch), self._reference.add(trajectories, batch)
        values = self._critic.add(trajectories, batch) if self._critic else None
        self._batches.append(_Batch(trajectories, scores, log_probs, values))

    def advance(self) -> None:
        """Process the responses that have arrived, and retry failed calls whose pause is over. Never waits.

        Raises the error of any batch if no trajectory causes it. If too many trajectories fail, raises
        ServiceFailed if all of them failed with it, TooManyFailedTrajectories otherwise.
        """
        if not sum([queue.advance() for queue in self._queues()]):
            return
        for batch in self._batches:
            if batch.ended:
                scored, failed_trajectories = batch.split()
                self.scored += scored
                self.failed_trajectories += failed_trajectories
        self._batches = [batch for batch in self._batches if not batch.ended]

    def seconds_until_retry(self) -> float | None:
        """Return the seconds until the next retry is due; None if none is pending."""
        times = [queue.retry_at for queue in self._queues() if queue.retry_at is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def cancel(self) -> None:
        """Cancel every call."""
        for queue in self._queues():
            queue.cancel()

    @property
    def batches_in_flight(self) -> int:
        """Number of batches that have not ended."""
        return len(self._batches)

    def _queues(self) -> list[_ServiceQueue]:
        return [queue for queue in (self._reward, self._reference, self._critic) if queue is not None]

    def _record_failure(self, failed: FailedTrajectory) -> None:
        id = failed.trajectory.id
        log.warning("trajectory failed", id=str(id), attempts=failed.attempts, error=failed.cause)
        first = next(iter(self._failed.values()), failed)
        self._failed.setdefault(id, failed)
        assert self._recovery is not None
        if len(self._failed) > self._recovery.max_failed_trajectories:
            ids = ", ".join(map(str, self._failed))
            text = (
                f"{first.error}\n"
                f"step {id.step}: {len(self._failed)} of its trajectories could not be scored, the first after "
                f"{first.attempts} attempts; recovery.max_failed_trajectories is {self._recovery.max_failed_trajectories}; "
                "fix the cause, or raise the limit\n"
                f"failed trajectories, see failed_trajectories.jsonl (run/step/prompt line from 0/sample): {ids}"
            )
            if all(item.fault is ServiceFailed for item in self._failed.values()):
                raise ServiceFailed(text)
            raise TooManyFailedTrajectories(text, list(self._failed.values()))


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch at all services."""

    trajectories: Sequence[Trajectory]
    scores: _BatchCall
    log_probs: _BatchCall
    values: _BatchCall | None

    @property
    def ended(self) -> bool:
        return self.scores.ended and self.log_probs.ended and (self.values is None or self.values.ended)

    def split(self) -> tuple[list[ScoredTrajectory], list[FailedTrajectory]]:
        """Return the scored trajectories and the failed ones."""
        scored, failed_trajectories = [], []
        values = (
            self.values.results
            if self.values
            else [np.zeros(len(item.response_ids), np.float32) for item in self.trajectories]
        )
        for trajectory, *results in zip(
            self.trajectories, self.scores.results, self.log_probs.results, values, strict=True
        ):
            failed = next((result for result in results if isinstance(result, FailedTrajectory)), None)
            if failed is not None:
                failed_trajectories.append(failed)
                continue
            (score, parts), log_probs, value = results
            scored.append(ScoredTrajectory(trajectory, score, log_probs, value, parts))
        return scored, failed_trajectories


def _split_scores(scores: Scores, _: Sequence[Trajectory]) -> list[Any]:
    """Return (score, its parts by name) of each trajectory."""
    return [
        (float(score), {name: float(numbers[row]) for name, numbers in scores.parts.items()})
        for row, score in enumerate(scores.total)
    ]


def _split_tokens(numbers: FloatArray, trajectories: Sequence[Trajectory]) -> list[Any]:
    """Split ``numbers`` [response tokens] by trajectory."""
    return list(np.split(numbers, np.cumsum([len(item.response_ids) for item in trajectories])[:-1]))


def _naming_batch(error: QuartetError, trajectories: Sequence[Trajectory]) -> QuartetError:
    """Return the error with the ids of the batch, because the service knows only their indices."""
    ids = ", ".join(str(trajectory.id) for trajectory in trajectories)
    return type(error)(f"{error}; the batch, from index 0 (run/step/prompt line from 0/sample): {ids}")
