"""Scoring at several services at once: what fails is tried again, in the end one by one, and set aside where it still fails."""

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
    InvalidRequest,
    NoResponse,
    QuartetError,
    ServiceFailed,
    TooManyFailedTrajectories,
)
from quartet.rpc.clients import ActorClient, CriticClient, PendingResult, RewardClient
from quartet.services.orchestrator.telemetry.timeline import Watch, unwatched
from quartet.types import FloatArray, Role, Scores, TokenBatch, Trajectory, TrajectoryId

log = structlog.get_logger()

FAULTS = (ComputationFailed, ServiceFailed, InvalidRequest)
"""What a trajectory may be to blame for, ``NoResponse`` excepted. A service that is gone, busy or late says nothing of it."""
PREFETCH = 2
"""Batches that a service has in hand beside two for each replica: one that it works on, and one that waits there."""
BATCH_ATTEMPTS = 2
"""Attempts for a batch before each of its trajectories is asked for alone: a fault that passes leaves the same bits then."""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with what the scoring services say of it.

    ``score`` in units of reward, and ``parts`` by name where it is a weighted sum; ``reference_log_probs`` and ``values``
    float32 [response tokens], values of 0 without a critic.
    """

    trajectory: Trajectory
    score: float
    reference_log_probs: FloatArray
    values: FloatArray
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailedTrajectory:
    """A trajectory that a service could not score: how often it was asked, and what it failed with at last.

    ``error`` may quote the response, as a user's function does; ``fault`` is its class, which tells nothing of the response.
    """

    trajectory: Trajectory
    attempts: int
    error: str
    fault: type[QuartetError]


class ReferencePolicy(Protocol):
    """Who knows the initial policy's log-probs: a reference service, or an actor with its adapter off."""

    role: Role

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs, float32 [response tokens]."""

    def replicas(self) -> int:
        """Processes that share the calls."""


class AdapterOff:
    """An actor with a LoRA adapter, as the reference that it is with the adapter off."""

    role = Role.ACTOR

    def __init__(self, actor: ActorClient) -> None:
        self._actor = actor

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs, after the generation in hand."""
        return self._actor.reference_log_probs(batch, temperature)

    def replicas(self) -> int:
        """One: there is one policy."""
        return 1


@dataclass(frozen=True, slots=True)
class ScoringServices:
    """Reward, reference and, where there is one, the critic: asked together. ``temperature`` is that of the rollouts."""

    reward: RewardClient
    reference: ReferencePolicy
    critic: CriticClient | None
    temperature: float


Ask = Callable[[Sequence[Trajectory], TokenBatch], PendingResult[Any]]
"""Sends trajectories to one service; the batch holds their tokens."""
Rows = Callable[[Any, Sequence[Trajectory]], list[Any]]
"""Cuts a service's answer into what it says of each trajectory."""


def at_once(replicas: int) -> int:
    """Batches that a service of so many replicas has in hand at once. More would not be scored sooner."""
    return 2 * replicas + PREFETCH


class _BatchCall:
    """What one service says of the trajectories of a batch: ``rows``, with FailedTrajectory where it could not say anything."""

    def __init__(self, queue: _ServiceQueue, trajectories: Sequence[Trajectory], batch: TokenBatch) -> None:
        self.rows: list[Any] = [None] * len(trajectories)
        self._queue, self._trajectories = queue, trajectories
        self._places = range(len(trajectories))
        """Of the trajectories that the call under way is about: all, or one."""
        self._failures = self._failures_together = 0
        self._next: range | None = None
        """What is asked again at ``_due``, by the lane's clock; the call under way has failed then."""
        self._due = 0.0
        self._batch: TokenBatch | None = batch
        """Until it is asked for."""
        self._call: PendingResult[Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a row for every trajectory."""
        return self._call is None and self._batch is None

    @property
    def waits_to_try_again(self) -> bool:
        """Whether the last call has failed, and the next one is not due yet."""
        return self._next is not None

    def begin(self) -> None:
        """Sends all of them."""
        assert self._batch is not None
        self._call, self._batch = self._queue.ask(self._trajectories, self._batch), None

    def advance(self, in_turn: bool) -> None:
        """Takes in what has been answered, and asks again for what has failed, where this batch is ``in_turn`` for that."""
        if self._next is not None:
            if self._queue.clock() < self._due:
                return
            self._ask(self._next)
        while self._next is None and self._call is not None and self._call.done():
            asked = self._asked()
            try:
                rows = self._queue.rows(self._call.result(), asked)
            except FAULTS as error:
                if self._queue.recovery is None or isinstance(error, NoResponse):
                    raise _naming(error, asked) from None
                if not in_turn:
                    return
                self._try_again(error, self._queue.recovery)
            else:
                self._take(rows)

    def cancel(self) -> None:
        """Tells the service that nobody waits any more."""
        if self._call is not None:
            self._call.cancel()

    def _asked(self) -> Sequence[Trajectory]:
        return self._trajectories[self._places.start : self._places.stop]

    def _ask(self, places: range) -> None:
        self._places, self._next = places, None
        self._call = self._queue.ask(self._asked(), TokenBatch.of(self._asked()))

    def _take(self, rows: list[Any]) -> None:
        end = self._places.stop
        self.rows[self._places.start : end] = rows
        if end == len(self._trajectories):
            self._call = None
            self._blame_the_service()
        else:
            self._failures = self._failures_together
            self._ask(range(end, end + 1))

    def _try_again(self, error: QuartetError, recovery: RecoveryConfig) -> None:
        self._failures += 1
        if len(self._places) > 1:
            alone = self._failures >= min(BATCH_ATTEMPTS, recovery.max_scoring_attempts - 1)
            self._failures_together = self._failures
            self._ask_later(range(1) if alone else self._places, recovery)
        elif self._failures < recovery.max_scoring_attempts:
            self._ask_later(self._places, recovery)
        else:
            failed_trajectories = FailedTrajectory(self._asked()[0], self._failures, str(error), type(error))
            self._queue.on_failure(failed_trajectories)
            self._take([failed_trajectories])

    def _ask_later(self, places: range, recovery: RecoveryConfig) -> None:
        self._next, self._due = places, self._queue.clock() + recovery.pause(self._failures)

    def _blame_the_service(self) -> None:
        """Raises ServiceFailed where not one of several trajectories, each alone, was answered: that is no trajectory's fault."""
        if len(self.rows) > 1 and all(
            isinstance(row, FailedTrajectory) and row.fault is ServiceFailed for row in self.rows
        ):
            raise _naming(ServiceFailed(self.rows[-1].error), self._trajectories)


class _ServiceQueue:
    """One service in one step. Batches are asked again in their order, one call at a time, so that nothing depends on timing."""

    def __init__(
        self,
        ask: Ask,
        rows: Rows,
        replicas: int,
        recovery: RecoveryConfig | None,
        on_failure: Callable[[FailedTrajectory], None],
        clock: Callable[[], float],
    ) -> None:
        """Without ``recovery`` the first failure is raised. ``heed`` hears of each that is set aside; ``clock`` is in seconds."""
        self._begin_call, self.rows, self.recovery, self.on_failure, self.clock = ask, rows, recovery, on_failure, clock
        self._most = at_once(replicas)
        self._waiting: deque[_BatchCall] = deque()
        self._under_way: list[_BatchCall] = []
        self._news = threading.Event()
        """Set when a call has ended."""

    def begin(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> _BatchCall:
        """Sends a batch, as soon as there is room for it."""
        answers = _BatchCall(self, trajectories, batch)
        self._waiting.append(answers)
        self._send()
        return answers

    def ask(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[Any]:
        """Begins a call."""
        call = self._begin_call(trajectories, batch)
        call.when_done(self._news.set)
        return call

    def advance(self) -> bool:
        """Takes in what has been answered; whether there was anything. Raises what is no trajectory's fault, of any batch."""
        if not self._news.is_set() and not any(answers.waits_to_try_again for answers in self._under_way):
            return False
        self._news.clear()
        in_turn = True
        for answers in self._under_way:
            answers.advance(in_turn)
            in_turn = in_turn and answers.ended
        self._under_way = [answers for answers in self._under_way if not answers.ended]
        self._send()
        return True

    def _send(self) -> None:
        while self._waiting and len(self._under_way) < self._most:
            answers = self._waiting.popleft()
            answers.begin()
            self._under_way.append(answers)

    def cancel(self) -> None:
        """Lets go of every call."""
        for answers in self._under_way:
            answers.cancel()


class Scoring:
    """The scoring of one step's trajectories, batch by batch.

    ``scored`` and ``failed_trajectories`` are those of the batches that have ended: of several services that failed the first one counts.
    """

    def __init__(
        self,
        services: ScoringServices,
        fields: Mapping[int, str],
        recovery: RecoveryConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch = unwatched,
    ) -> None:
        """``fields`` are the prompts' own, by prompt index, where the reward looks at them. ``watch`` hears of every call.

        ``recovery`` says how often a trajectory is tried, after which pauses by ``clock`` (seconds), and how many may be set
        aside; without it any failure is raised.
        """
        self.scored: list[ScoredTrajectory] = []
        self.failed_trajectories: list[FailedTrajectory] = []
        self._recovery = recovery
        self._given_up: dict[TrajectoryId, FailedTrajectory] = {}
        self._under_way: list[_Batch] = []

        def ask_reward(trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[Scores]:
            call = services.reward.score(batch, [fields[item.id.prompt] for item in trajectories] if fields else [])
            watch(Role.REWARD, "score", call)
            return call

        def ask_reference(_: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[FloatArray]:
            call = services.reference.log_probs(batch, services.temperature)
            watch(services.reference.role, "log_probs", call)
            return call

        def ask_critic(trajectories: Sequence[Trajectory], batch: TokenBatch) -> PendingResult[FloatArray]:
            assert services.critic is not None
            # It has learned from all steps before, also where an older policy generated this one.
            call = services.critic.values(batch, trajectories[0].id.step - 1)
            watch(Role.CRITIC, "values", call)
            return call

        def queue(ask: Ask, rows: Rows, replicas: int) -> _ServiceQueue:
            return _ServiceQueue(ask, rows, replicas, recovery, self._record_failure, clock)

        self._reward = queue(ask_reward, _score_rows, services.reward.replicas())
        self._reference = queue(ask_reference, _token_rows, services.reference.replicas())
        self._critic = queue(ask_critic, _token_rows, services.critic.replicas()) if services.critic else None

    def begin(self, trajectories: Sequence[Trajectory]) -> None:
        """Sends one ragged batch to all services, to each as soon as it has room for it."""
        batch = TokenBatch.of(trajectories)
        scores, log_probs = self._reward.begin(trajectories, batch), self._reference.begin(trajectories, batch)
        values = self._critic.begin(trajectories, batch) if self._critic else None
        self._under_way.append(_Batch(trajectories, scores, log_probs, values))

    def advance(self) -> None:
        """Takes in what has been answered, and asks again for what has failed, once its pause is over. Never waits.

        Raises what is no trajectory's fault, whichever batch it happened to, and TooManyFailedTrajectories; ServiceFailed in its stead
        where a service failed and said nothing else.
        """
        if not sum([queue.advance() for queue in self._queues()]):
            return
        for batch in self._under_way:
            if batch.ended:
                scored, failed_trajectories = batch.split()
                self.scored += scored
                self.failed_trajectories += failed_trajectories
        self._under_way = [batch for batch in self._under_way if not batch.ended]

    def cancel(self) -> None:
        """Lets go of every call."""
        for queue in self._queues():
            queue.cancel()

    @property
    def under_way(self) -> int:
        """Batches that have not ended."""
        return len(self._under_way)

    def _queues(self) -> list[_ServiceQueue]:
        return [queue for queue in (self._reward, self._reference, self._critic) if queue is not None]

    def _record_failure(self, failed_trajectories: FailedTrajectory) -> None:
        id = failed_trajectories.trajectory.id
        # The error's text may quote the response, which is no matter for a log.
        log.warning(
            "trajectory set aside",
            id=str(id),
            attempts=failed_trajectories.attempts,
            error=failed_trajectories.fault.__name__,
        )
        first = next(iter(self._given_up.values()), failed_trajectories)
        self._given_up.setdefault(id, failed_trajectories)
        assert self._recovery is not None
        if len(self._given_up) > self._recovery.max_failed_trajectories:
            ids = ", ".join(map(str, self._given_up))
            text = (
                f"step {id.step}: {len(self._given_up)} of its trajectories could not be scored, recovery.max_failed_trajectories is "
                f"{self._recovery.max_failed_trajectories}; mend what fails, or raise it; the first after {first.attempts} attempts: "
                f"{first.error}; all of them (run/step/prompt line from 0/sample): {ids}"
            )
            if all(item.fault is ServiceFailed for item in self._given_up.values()):
                raise ServiceFailed(text)
            raise TooManyFailedTrajectories(text, list(self._given_up.values()))


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
        """Those that have been scored, and those that could not be."""
        scored, failed_trajectories = [], []
        values = (
            self.values.rows if self.values else [np.zeros(len(t.response_ids), np.float32) for t in self.trajectories]
        )
        for trajectory, *rows in zip(self.trajectories, self.scores.rows, self.log_probs.rows, values, strict=True):
            failed = next((row for row in rows if isinstance(row, FailedTrajectory)), None)
            if failed is not None:
                failed_trajectories.append(failed)
                continue
            (score, parts), log_probs, value = rows
            scored.append(ScoredTrajectory(trajectory, score, log_probs, value, parts))
        return scored, failed_trajectories


def _score_rows(scores: Scores, _: Sequence[Trajectory]) -> list[Any]:
    """(score, its parts by name) of each trajectory."""
    return [
        (float(score), {name: float(numbers[row]) for name, numbers in scores.parts.items()})
        for row, score in enumerate(scores.total)
    ]


def _token_rows(numbers: FloatArray, trajectories: Sequence[Trajectory]) -> list[Any]:
    """Each trajectory's own of ``numbers`` [response tokens]."""
    return list(np.split(numbers, np.cumsum([len(item.response_ids) for item in trajectories])[:-1]))


def _naming(error: QuartetError, trajectories: Sequence[Trajectory]) -> QuartetError:
    """The failure with the names of what was asked for: the service knows their places in the batch only."""
    ids = ", ".join(str(trajectory.id) for trajectory in trajectories)
    return type(error)(f"{error}; the batch, from index 0 (run/step/prompt line from 0/sample): {ids}")
