"""Collection of a step: trajectories stream out of the buffer and are scored while generation continues."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from quartet.buffer.rollout_stream import Delivery, RolloutStream
from quartet.config import RecoveryConfig
from quartet.errors import BufferFailed
from quartet.rpc.pending_calls import PendingResult
from quartet.services.orchestrator.rollout.scoring import FailedTrajectory, ScoredTrajectory, Scoring, ScoringServices
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call
from quartet.types import Trajectory, TrajectoryId

READ_BLOCK_SECONDS = 0.2
"""Longest wait of one read of the stream. Failures of generation and scoring are checked between reads."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """Scored and failed trajectories of a step, each sorted by id, the stream entries to acknowledge, and seconds spent."""

    scored: list[ScoredTrajectory]
    failed_trajectories: list[FailedTrajectory]
    entry_ids: list[str]
    generate_seconds: float
    score_seconds: float


@dataclass(frozen=True, slots=True)
class ReplacementRule:
    """Rule for a trajectory that cannot be scored: the next sample of its prompt replaces it.

    ``recovery`` limits the attempts and the failed trajectories. ``generate`` starts the generation of one trajectory for each of
    the given prompt indices, with the given sample index, by the policy of ``policy_version``.
    """

    recovery: RecoveryConfig
    policy_version: int
    generate: Callable[[set[int], int], PendingResult[int]]


class Collector:
    """Reader of one run's rollout stream, which scores trajectories as they arrive."""

    def __init__(
        self,
        stream: RolloutStream,
        services: ScoringServices,
        score_batch_size: int,
        observe: CallObserver = ignore_call,
    ) -> None:
        """``observe`` receives every scoring call."""
        self._stream, self._services, self._score_batch_size, self._observe = (
            stream,
            services,
            score_batch_size,
            observe,
        )

    def collect(
        self,
        expected: set[TrajectoryId],
        policy_version: int,
        generation: PendingResult[int],
        on_progress: Callable[[int], None],
        fields: Mapping[int, str] | None = None,
        replacement: ReplacementRule | None = None,
    ) -> CollectedStep:
        """Wait for every expected trajectory and its scores. ``on_progress`` receives the number scored so far.

        ``fields`` are the prompts' own fields by prompt index, for reward functions. Without ``replacement``, a trajectory that
        cannot be scored is an error.

        Batches hold ``score_batch_size`` trajectories in the order in which the engine finished them, so their composition does
        not depend on timing. Raises the error of generation or scoring, BufferFailed if the stream holds an unexpected
        trajectory, and TooManyFailedTrajectories.
        """
        start = time.perf_counter()
        recovery = replacement.recovery if replacement else None
        response_arrived = threading.Event()
        scoring = Scoring(
            self._services, fields or {}, recovery, observe=self._observe, on_response=response_arrived.set
        )
        arrivals = _Arrivals(dict.fromkeys(expected, policy_version))
        samples = 1 + max(id.sample for id in expected)
        try:
            self._receive(arrivals, generation, scoring, on_progress)
            generated = time.perf_counter()
            _wait(generation, scoring, on_progress, response_arrived)
            for replaced in count():
                prompts = {prompt for prompt, failed in _failed_by_prompt(scoring).items() if failed > replaced}
                if replacement is None or not prompts:
                    break
                arrivals.expect(prompts, samples + replaced, replacement.policy_version)
                generation = replacement.generate(prompts, samples + replaced)
                self._receive(arrivals, generation, scoring, on_progress)
                _wait(generation, scoring, on_progress, response_arrived)
            self._read_late_duplicates(arrivals)
        except BaseException:
            generation.cancel()
            scoring.cancel()
            raise
        scored = sorted(scoring.scored, key=lambda item: item.trajectory.id)
        failed_trajectories = sorted(scoring.failed_trajectories, key=lambda item: item.trajectory.id)
        return CollectedStep(
            scored, failed_trajectories, arrivals.entry_ids, generated - start, time.perf_counter() - generated
        )

    def _receive(
        self,
        arrivals: _Arrivals,
        generation: PendingResult[int],
        scoring: Scoring,
        on_progress: Callable[[int], None],
    ) -> None:
        """Read the trajectories that are still expected, and start to score them."""
        waiting: list[Trajectory] = []
        while not arrivals.complete:
            ended = generation.done()
            deliveries = self._stream.read(self._score_batch_size, READ_BLOCK_SECONDS)
            if not deliveries and ended:
                generation.result()
                # A delivery may have been lost on its way to this process; Redis still counts it as delivered.
                deliveries = [item for item in self._stream.delivered() if item.trajectory.id not in arrivals.seen]
                if not deliveries:
                    raise BufferFailed(
                        f"rollout stream: generation ended with {len(arrivals.seen)} of {len(arrivals.expected)} "
                        "trajectories in the stream"
                    )
            waiting += arrivals.add(deliveries)
            while len(waiting) >= self._score_batch_size or (waiting and arrivals.complete):
                scoring.start(waiting[: self._score_batch_size])
                waiting = waiting[self._score_batch_size :]
            _advance(scoring, on_progress)

    def _read_late_duplicates(self, arrivals: _Arrivals) -> None:
        """Read entries that repeat a trajectory, so that this step acknowledges them and the next step does not see them.

        Call this after generation has ended, when no further entry can follow.
        """
        while deliveries := self._stream.read(self._score_batch_size, 0.0):
            arrivals.add(deliveries)


@dataclass(slots=True)
class _Arrivals:
    """Trajectories that a step expects, those that have arrived, and their stream entries."""

    expected: dict[TrajectoryId, int]
    """Policy version that generates each trajectory."""
    seen: set[TrajectoryId] = field(default_factory=set)
    entry_ids: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.seen) == len(self.expected)

    def expect(self, prompts: set[int], sample: int, policy_version: int) -> None:
        """Expect one more trajectory of each of the prompts."""
        other = next(iter(self.expected))
        more = {TrajectoryId(other.run, other.step, prompt, sample) for prompt in prompts}
        self.expected |= dict.fromkeys(more, policy_version)

    def add(self, deliveries: Sequence[Delivery]) -> list[Trajectory]:
        """Return the trajectories that had not arrived before. Raises BufferFailed for an unexpected one."""
        new = []
        for delivery in deliveries:
            trajectory = delivery.trajectory
            self.entry_ids.append(delivery.entry_id)
            if self.expected.get(trajectory.id) != trajectory.policy_version:
                raise BufferFailed(
                    f"rollout stream: {trajectory.id} of policy version {trajectory.policy_version} was not requested"
                )
            if trajectory.id not in self.seen:
                self.seen.add(trajectory.id)
                new.append(trajectory)
        return new


def _failed_by_prompt(scoring: Scoring) -> Counter[int]:
    return Counter(item.trajectory.id.prompt for item in scoring.failed_trajectories)


def _advance(scoring: Scoring, on_progress: Callable[[int], None]) -> None:
    scoring.advance()
    on_progress(len(scoring.scored))


def _wait(
    generation: PendingResult[int],
    scoring: Scoring,
    on_progress: Callable[[int], None],
    response_arrived: threading.Event,
) -> None:
    """Wait until generation and scoring have ended. Raises the first failure as soon as it arrives."""
    generation.when_done(response_arrived.set)
    while True:
        # Cleared before the calls are examined: a response that arrives in between sets it again.
        response_arrived.clear()
        if generation.done():
            generation.result()
        _advance(scoring, on_progress)
        if generation.done() and not scoring.batches_in_flight:
            return
        response_arrived.wait(scoring.seconds_until_retry())
