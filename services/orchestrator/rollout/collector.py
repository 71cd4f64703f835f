"""Collecting a step: trajectories stream out of the buffer and are scored by several services at once as they arrive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quartet.buffer.rollout_stream import Delivery, RolloutStream
from quartet.config import RecoveryConfig
from quartet.errors import BufferFailed
from quartet.rpc.clients import PendingResult
from quartet.services.orchestrator.rollout.scoring import FailedTrajectory, ScoredTrajectory, Scoring, ScoringServices
from quartet.services.orchestrator.telemetry.timeline import Watch, unwatched
from quartet.types import Trajectory, TrajectoryId

READ_BLOCK = 0.2
"""Seconds that a read of the stream may wait; failures of generation and scoring are looked for in between."""
POLL = 0.002
"""Seconds between looks at calls under way."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step's scored trajectories, and those set aside, each sorted by id; the stream entries to acknowledge; seconds spent."""

    scored: list[ScoredTrajectory]
    failed_trajectories: list[FailedTrajectory]
    entry_ids: list[str]
    generate_seconds: float
    score_seconds: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """The rule for a trajectory that cannot be scored: the next sample of its prompt takes its place.

    ``recovery`` says how often it is tried, and how many may be set aside. ``generate`` begins one trajectory of each of the
    prompts given by index, with the sample index given, by the policy of ``policy_version``.
    """

    recovery: RecoveryConfig
    policy_version: int
    generate: Callable[[set[int], int], PendingResult[int]]


class Collector:
    """Reads one run's rollout stream, step by step."""

    def __init__(
        self, stream: RolloutStream, services: ScoringServices, score_batch_size: int, watch: Watch = unwatched
    ) -> None:
        """``watch`` hears of every call that scores."""
        self._stream, self._services, self._score_batch, self._watch = stream, services, score_batch_size, watch

    def collect(
        self,
        expected: set[TrajectoryId],
        policy_version: int,
        generation: PendingResult[int],
        on_progress: Callable[[int], None],
        fields: Mapping[int, str] | None = None,
        replacement: Replacement | None = None,
    ) -> CollectedStep:
        """Waits for every expected trajectory and its scores. ``on_progress`` hears how many have been scored.

        ``fields`` are the prompts' own, by prompt index, where the reward looks at them. ``replacement`` is what becomes of a
        trajectory that cannot be scored; without it that is an error.

        Batches are made of ``score_batch_size`` trajectories in the order in which the engine finished them, so that what a
        batch holds does not depend on timing. Raises what generation or scoring failed with, BufferFailed when the
        stream holds something else than was asked for, TooManyFailedTrajectories.
        """
        start = time.perf_counter()
        recovery = replacement.recovery if replacement else None
        scoring = Scoring(self._services, fields or {}, recovery, watch=self._watch)
        arrivals = _Arrivals(dict.fromkeys(expected, policy_version))
        samples = 1 + max(id.sample for id in expected)
        try:
            self._receive(arrivals, generation, scoring, on_progress)
            generated = time.perf_counter()
            _wait(generation, scoring, on_progress)
            for replaced in count():
                prompts = {prompt for prompt, failed in _failed_by_prompt(scoring).items() if failed > replaced}
                if replacement is None or not prompts:
                    break
                arrivals.expect(prompts, samples + replaced, replacement.policy_version)
                generation = replacement.generate(prompts, samples + replaced)
                self._receive(arrivals, generation, scoring, on_progress)
                _wait(generation, scoring, on_progress)
            self._late_repeats(arrivals)
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
        """Takes in what is still expected, and sends it to be scored."""
        waiting: list[Trajectory] = []
        while not arrivals.complete:
            ended = generation.done()
            deliveries = self._stream.read(self._score_batch, READ_BLOCK)
            if not deliveries and ended:
                generation.result()
                # A delivery may have been lost on its way here; Redis still counts it as ours.
                deliveries = [item for item in self._stream.delivered() if item.trajectory.id not in arrivals.seen]
                if not deliveries:
                    raise BufferFailed(
                        f"rollout stream: generation ended with {len(arrivals.seen)} of {len(arrivals.expected)} "
                        "trajectories in the stream"
                    )
            waiting += arrivals.take(deliveries)
            while len(waiting) >= self._score_batch or (waiting and arrivals.complete):
                scoring.begin(waiting[: self._score_batch])
                waiting = waiting[self._score_batch :]
            _look(scoring, on_progress)

    def _late_repeats(self, arrivals: _Arrivals) -> None:
        """Takes in entries that repeat what is there already. They are this step's to free, or the next one would meet them.

        To be called when generation has ended, so that nothing can follow.
        """
        while deliveries := self._stream.read(self._score_batch, 0.0):
            arrivals.take(deliveries)


@dataclass(slots=True)
class _Arrivals:
    """What a step expects of the stream, what of it has come, and under which entries."""

    expected: dict[TrajectoryId, int]
    """And the policy version that generates it."""
    seen: set[TrajectoryId] = field(default_factory=set)
    entry_ids: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.seen) == len(self.expected)

    def expect(self, prompts: set[int], sample: int, policy_version: int) -> None:
        """Adds one trajectory of each of the prompts."""
        some = next(iter(self.expected))
        more = {TrajectoryId(some.run, some.step, prompt, sample) for prompt in prompts}
        self.expected |= dict.fromkeys(more, policy_version)

    def take(self, deliveries: Sequence[Delivery]) -> list[Trajectory]:
        """Those that have not come before. Raises BufferFailed for one that was not asked for."""
        fresh = []
        for delivery in deliveries:
            trajectory = delivery.trajectory
            self.entry_ids.append(delivery.entry_id)
            if self.expected.get(trajectory.id) != trajectory.policy_version:
                raise BufferFailed(
                    f"rollout stream: {trajectory.id} of policy version {trajectory.policy_version} was not asked for"
                )
            if trajectory.id not in self.seen:
                self.seen.add(trajectory.id)
                fresh.append(trajectory)
        return fresh


def _failed_by_prompt(scoring: Scoring) -> Counter[int]:
    return Counter(item.trajectory.id.prompt for item in scoring.failed_trajectories)


def _look(scoring: Scoring, on_progress: Callable[[int], None]) -> None:
    scoring.advance()
    on_progress(len(scoring.scored))


def _wait(generation: PendingResult[int], scoring: Scoring, on_progress: Callable[[int], None]) -> None:
    """Waits until generation and scoring have ended. Raises the first failure as soon as it is there."""
    while True:
        raise_failures([generation])
        _look(scoring, on_progress)
        if generation.done() and not scoring.under_way:
            return
        time.sleep(POLL)


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
