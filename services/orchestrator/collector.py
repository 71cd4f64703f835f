"""Collecting a step: trajectories stream out of the buffer and are scored by several services at once as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quartet.buffer.rollouts import RolloutStream
from quartet.errors import BufferFailed, ComputationFailed, ServiceFailed
from quartet.rpc.clients import ActorClient, CriticClient, PendingResult, RewardClient
from quartet.types import FloatArray, Scores, TokenBatch, Trajectory, TrajectoryId

READ_BLOCK = 0.2
"""Seconds that a read of the stream may wait; failures of generation and scoring are looked for in between."""
POLL = 0.002
"""Seconds between looks at calls under way."""
MAX_IN_FLIGHT = 4
"""Batches under way at once. More would not be scored sooner: each service computes one at a time."""


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
class CollectedStep:
    """A step's scored trajectories, sorted by id; the stream entries to acknowledge; seconds spent."""

    scored: list[ScoredTrajectory]
    entry_ids: list[str]
    seconds_generate: float
    seconds_score: float


class ReferencePolicy(Protocol):
    """Who knows the initial policy's log-probs: a reference service, or an actor with its adapter off."""

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs, float32 [response tokens]."""


class AdapterOff:
    """An actor with a LoRA adapter, as the reference that it is with the adapter off."""

    def __init__(self, actor: ActorClient) -> None:
        self._actor = actor

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs, after the generation in hand."""
        return self._actor.reference_log_probs(batch, temperature)


class ScoringServices:
    """Reward, reference and, where there is one, the critic: asked together."""

    def __init__(
        self, reward: RewardClient, reference: ReferencePolicy, critic: CriticClient | None, temperature: float
    ) -> None:
        self._reward, self._reference, self._critic, self._temperature = reward, reference, critic, temperature

    def begin(self, trajectories: list[Trajectory], fields: Mapping[int, str]) -> ScoringBatch:
        """Sends one ragged batch to all of them, the prompts' own ``fields`` by prompt index to the reward."""
        batch = TokenBatch.of(trajectories)
        rows = [fields[trajectory.id.prompt] for trajectory in trajectories] if fields else []
        return ScoringBatch(
            trajectories,
            self._reward.score(batch, rows),
            self._reference.log_probs(batch, self._temperature),
            self._critic.values(batch) if self._critic else None,
        )


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """One batch under way at the scoring services."""

    trajectories: list[Trajectory]
    scores: PendingResult[Scores]
    reference_log_probs: PendingResult[FloatArray]
    values: PendingResult[FloatArray] | None

    @property
    def pending(self) -> tuple[PendingResult[Any], ...]:
        """The calls."""
        calls = (self.scores, self.reference_log_probs, self.values)
        return tuple(call for call in calls if call is not None)

    def ended(self) -> bool:
        """Whether all calls have succeeded. Raises the failure of one that has not."""
        if self.scores.done():
            self._check_scores()
        raise_failures(self.pending)
        return all(call.done() for call in self.pending)

    def _check_scores(self) -> None:
        """Raises what the reward failed with, and the names of what it was asked: it knows their places in the batch only."""
        try:
            self.scores.result()
        except (ServiceFailed, ComputationFailed) as error:
            ids = ", ".join(str(trajectory.id) for trajectory in self.trajectories)
            raise type(error)(f"{error}; the batch, from index 0 (run/step/prompt line from 0/sample): {ids}") from None

    def scored(self) -> list[ScoredTrajectory]:
        """The answers, trajectory by trajectory."""
        ends = np.cumsum([len(trajectory.response_ids) for trajectory in self.trajectories])
        scores, log_probs = self.scores.result(), self.reference_log_probs.result()
        values = self.values.result() if self.values else np.zeros(int(ends[-1]), np.float32)
        parts = [
            {name: float(numbers[row]) for name, numbers in scores.parts.items()} for row in range(len(scores.total))
        ]
        rows = zip(
            self.trajectories,
            scores.total,
            np.split(log_probs, ends[:-1]),
            np.split(values, ends[:-1]),
            parts,
            strict=True,
        )
        return [
            ScoredTrajectory(trajectory, float(score), reference, value, named)
            for trajectory, score, reference, value, named in rows
        ]


class Collector:
    """Reads one run's rollout stream, step by step."""

    def __init__(self, stream: RolloutStream, services: ScoringServices, score_batch: int) -> None:
        self._stream, self._services, self._score_batch = stream, services, score_batch

    def collect(
        self,
        expected: set[TrajectoryId],
        policy_version: int,
        generation: PendingResult[int],
        on_progress: Callable[[int], None],
        fields: Mapping[int, str] | None = None,
    ) -> CollectedStep:
        """Waits for every expected trajectory and its scores. ``on_progress`` hears how many have been scored.

        ``fields`` are the prompts' own, by prompt index, where the reward looks at them.

        Batches are made of ``score_batch`` trajectories in the order in which the engine finished them, so that what a
        batch holds does not depend on timing. Raises what generation or scoring failed with, BufferFailed when the
        stream holds something else than was asked for.
        """
        start = time.perf_counter()
        batches: list[ScoringBatch] = []
        try:
            entry_ids, generated = self._receive(
                expected, policy_version, generation, batches, on_progress, fields or {}
            )
            wait_for_all([generation, *_calls(batches)], lambda: on_progress(_finished(batches)))
            entry_ids += self._late_repeats(expected, policy_version)
        except BaseException:
            generation.cancel()
            for call in _calls(batches):
                call.cancel()
            raise
        scored = [item for batch in batches for item in batch.scored()]
        scored.sort(key=lambda item: item.trajectory.id)
        return CollectedStep(scored, entry_ids, generated - start, time.perf_counter() - generated)

    def _receive(
        self,
        expected: set[TrajectoryId],
        policy_version: int,
        generation: PendingResult[int],
        batches: list[ScoringBatch],
        on_progress: Callable[[int], None],
        fields: Mapping[int, str],
    ) -> tuple[list[str], float]:
        seen: set[TrajectoryId] = set()
        entry_ids: list[str] = []
        waiting: list[Trajectory] = []
        while len(seen) < len(expected):
            ended = generation.done()
            deliveries = self._stream.read(self._score_batch, READ_BLOCK)
            if not deliveries and ended:
                generation.result()
                # A delivery may have been lost on its way here; Redis still counts it as ours.
                deliveries = [item for item in self._stream.delivered() if item.trajectory.id not in seen]
                if not deliveries:
                    raise BufferFailed(
                        f"rollout stream: generation ended with {len(seen)} of {len(expected)} trajectories in the stream"
                    )
            for delivery in deliveries:
                trajectory = delivery.trajectory
                entry_ids.append(delivery.entry_id)
                _check_asked_for(trajectory, expected, policy_version)
                if trajectory.id in seen:
                    continue
                seen.add(trajectory.id)
                waiting.append(trajectory)
            while len(waiting) >= self._score_batch or (waiting and len(seen) == len(expected)):
                self._wait_for_a_place(batches, on_progress)
                batches.append(self._services.begin(waiting[: self._score_batch], fields))
                waiting = waiting[self._score_batch :]
            on_progress(_finished(batches))
        return entry_ids, time.perf_counter()

    @staticmethod
    def _wait_for_a_place(batches: list[ScoringBatch], on_progress: Callable[[int], None]) -> None:
        while len(_under_way(batches)) >= MAX_IN_FLIGHT:
            on_progress(_finished(batches))
            time.sleep(POLL)

    def _late_repeats(self, expected: set[TrajectoryId], policy_version: int) -> list[str]:
        """Entries that repeat what is there already. They are this step's to free, or the next one would meet them.

        To be called when generation has ended, so that nothing can follow.
        """
        entry_ids: list[str] = []
        while deliveries := self._stream.read(self._score_batch, 0.0):
            for delivery in deliveries:
                _check_asked_for(delivery.trajectory, expected, policy_version)
                entry_ids.append(delivery.entry_id)
        return entry_ids


def _check_asked_for(trajectory: Trajectory, expected: set[TrajectoryId], policy_version: int) -> None:
    if trajectory.id not in expected or trajectory.policy_version != policy_version:
        raise BufferFailed(
            f"rollout stream: {trajectory.id} of policy version {trajectory.policy_version} was not asked for"
        )


def _calls(batches: Sequence[ScoringBatch]) -> list[PendingResult[Any]]:
    return [call for batch in batches for call in batch.pending]


def _under_way(batches: Sequence[ScoringBatch]) -> list[ScoringBatch]:
    return [batch for batch in batches if not batch.ended()]


def _finished(batches: Sequence[ScoringBatch]) -> int:
    return sum(len(batch.trajectories) for batch in batches if batch.ended())


def raise_failures(calls: Sequence[PendingResult[Any]]) -> None:
    """Raises the failure of the first call that has ended with one."""
    for call in calls:
        if call.done():
            call.result()


def wait_for_all(calls: Sequence[PendingResult[Any]], tick: Callable[[], None] = lambda: None) -> None:
    """Waits until every call has ended; raises the first failure as soon as it is there, whatever the others still do."""
    while True:
        raise_failures(calls)
        tick()
        if all(call.done() for call in calls):
            return
        time.sleep(POLL)
