"""Profiling of steps: one span per block of work, exported as step seconds, timeline and OpenTelemetry traces."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quartet.contract.status import Role
from quartet.contract.update import UpdateResult
from quartet.errors import QuartetError
from quartet.telemetry.traces import NoTraces, StepTraces

CallObserver = Callable[[str, str, Future[Any]], None]
"""Function that receives a call that has just started: the service, the phase and the pending result."""
MAX_SPANS = 200
"""Largest number of spans kept per step. Beyond it, neighbouring spans of one kind are merged."""
MAX_GENERATORS = 32
"""Largest number of generators with their own spans in a step. Those that end last keep them, because the step waits for them."""
OTHER_GENERATORS = f"{Role.GENERATOR} (others)"
"""Service of the spans of all other generators."""
WEIGHT_PHASES = ("publish", "update_weights")
"""Phases in which weights are on their way to generators."""
GENERATION_PHASES = ("generate", "evaluate")
"""Phases of generators that are no work for which weights could wait."""
DIGITS = 6
"""Decimal places of seconds in the file."""


def ignore_call(service: str, phase: str, call: Future[Any]) -> None:
    """Do nothing: a ``CallObserver`` for callers without a profiler."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a process during a step. Times are in seconds after the start of the step."""

    service: str
    """actor, critic, reward, reference, orchestrator or redis; "generator HOST:PORT" for one in a separate process."""
    phase: str
    """generate, evaluate, score, log_probs, values, wait, prepare, seal, update, publish, update_weights, commit, acknowledge or
    checkpoint."""
    start: float
    end: float
    count: int = 1
    """Number of calls in the span. Adjacent calls of one kind are merged if a step has very many."""

    def row(self) -> dict[str, Any]:
        """Return the span as an object of ``timeline.jsonl``."""
        start, end = round(self.start, DIGITS), round(self.end, DIGITS)
        return {"service": self.service, "phase": self.phase, "start": start, "end": end, "count": self.count}


@dataclass(slots=True)
class Activity:
    """A block or call on the profiler's clock. ``end`` is None while it is in progress."""

    service: str
    phase: str
    start: float
    call: Future[Any] | None
    end: float | None = None

    @property
    def seconds(self) -> float:
        """Duration of an activity that has ended."""
        assert self.end is not None
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Seconds of the services' calls.

    ``exposed``: those in which a step waited for weights, because a version was published, or loaded by a generator, and no
    service trained, scored or saved. Generations do not count as other work, because they wait for the weights, too. ``busy``:
    those of each service and phase, in which at least one such call was in progress.
    """

    exposed: float
    busy: Mapping[tuple[str, str], float]


class StepProfiler:
    """Profiler of the training thread's blocks in each step, and of the calls that they start.

    Thread-safe, because the thread that receives a response records the end of its call.
    """

    def __init__(self, traces: StepTraces | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """``traces`` export every step as one trace. Defaults to no traces.

        ``clock`` returns seconds. The start of each step must come from the same clock.
        """
        self._traces, self._clock = traces or NoTraces(), clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._activities: list[Activity] = []
        # Those of the services since the last ``take_calls``.
        self._calls: list[Activity] = []
        self._taken = clock()

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return a context around a whole step, which is the root of its trace. Drops the seconds of a failed attempt."""
        self._seconds.clear()
        return self._traces.step(step)

    @contextmanager
    def span(self, service: str, phase: str, waits: bool = False) -> Iterator[Activity]:
        """Measure the block inside, also if it fails.

        ``service`` is the process that works. With ``waits``, the block waits for the calls of other services; the timeline shows
        it as a wait.
        """
        activity = self._start(service, "wait" if waits else phase, None)
        try:
            with self._traces.span(service, phase):
                yield activity
        finally:
            self._end(activity)
            self._seconds[phase] += activity.seconds

    def observe(self, service: str, phase: str, call: Future[Any]) -> None:
        """Record a call that has just started on the timeline, until its response arrives or it fails.

        The last seconds of an update that publishes weights have the phase publish.
        """
        activity = self._start(service, phase, call)
        call.add_done_callback(lambda _: self._end(activity))

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as ``PHASE_seconds``."""
        seconds = {f"{phase}_seconds": value for phase, value in self._seconds.items()}
        self._seconds.clear()
        return seconds

    def take_calls(self) -> CallSeconds:
        """Return the seconds of the services' calls since the last ``take_calls``."""
        with self._lock:
            begin, self._taken = self._taken, self._end_answered()
            calls, self._calls = self._calls, [call for call in self._calls if call.end is None]
            kinds: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for call in calls:
                kinds[call.service, call.phase].append((max(begin, call.start), call.end or self._taken))
        work, weights = (
            [
                interval
                for (_, phase), intervals in kinds.items()
                if phase not in GENERATION_PHASES and (phase in WEIGHT_PHASES) == of_weights
                for interval in intervals
            ]
            for of_weights in (False, True)
        )
        busy = {kind: _covered(intervals) for kind, intervals in kinds.items()}
        return CallSeconds(_covered(work + weights) - _covered(work), busy)

    def end_step(self, started: float) -> list[Span]:
        """Return the spans since ``started``, sorted by service and start, at most MAX_SPANS.

        An activity in progress is cut at the current time, and continues in the next step.
        """
        with self._lock:
            now = self._end_answered()
            activities = self._activities
            self._activities = [activity for activity in activities if activity.end is None]
            spans = [
                Span(item.service, item.phase, max(0.0, item.start - started), (item.end or now) - started)
                for item in activities
                if (item.end or now) > started
            ]
        return merge_neighbours(join_generators(spans, MAX_GENERATORS), MAX_SPANS)

    def _start(self, service: str, phase: str, call: Future[Any] | None) -> Activity:
        with self._lock:
            activity = Activity(service, phase, self._clock(), call)
            self._activities.append(activity)
            if call is not None:
                self._calls.append(activity)
        return activity

    def _end(self, activity: Activity) -> None:
        with self._lock:
            self._record_end(activity, self._clock())

    def _end_answered(self) -> float:
        """Record the end of the calls that have ended. The training thread may see a response before their callbacks do.

        Return the current time. The lock must be held.
        """
        now = self._clock()
        for activity in [*self._activities]:
            if activity.call is not None and activity.call.done():
                self._record_end(activity, now)
        return now

    def _record_end(self, activity: Activity, now: float) -> None:
        if activity.end is not None:
            return
        activity.end = now
        if seconds := _publication_seconds(activity):
            # A recorded result may name a longer publication, which its call has not waited for.
            activity.end = min(now, max(activity.start, now - seconds))
            publication = Activity(activity.service, "publish", activity.end, activity.call, now)
            self._activities.append(publication)
            self._calls.append(publication)


def _publication_seconds(activity: Activity) -> float:
    """Return the last seconds of a call that has ended, in which weights were published."""
    if activity.phase != "update" or activity.call is None:
        return 0.0
    try:
        result = activity.call.result()
    except (QuartetError, CancelledError):
        return 0.0
    publication = result.publication if isinstance(result, UpdateResult) else None
    return publication.seconds if publication is not None else 0.0


def _covered(times: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that intervals of start and end cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(times):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def join_generators(spans: Sequence[Span], max_generators: int) -> list[Span]:
    """Give the spans of all generators but ``max_generators`` to OTHER_GENERATORS. Those that end last keep their spans."""
    ends: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.service.startswith(f"{Role.GENERATOR} "):
            ends[span.service] = max(ends[span.service], span.end)
    if len(ends) <= max_generators:
        return [*spans]
    others = set(sorted(ends, key=lambda service: (-ends[service], service))[max_generators:])
    return [replace(span, service=OTHER_GENERATORS) if span.service in others else span for span in spans]


def merge_neighbours(spans: Sequence[Span], max_spans: int) -> list[Span]:
    """Merge neighbouring spans of one service and phase over the smallest gaps, until at most ``max_spans`` are left.

    At least one span of each service and phase remains. The result is sorted by service and start.
    """
    kinds: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        kinds[span.service, span.phase].append(span)
    gaps = []
    for kind, neighbours in kinds.items():
        end = neighbours[0].end
        for index, span in enumerate(neighbours[1:], 1):
            gaps.append((span.start - end, kind, index))
            end = max(end, span.end)
    closed = {(kind, index) for _, kind, index in sorted(gaps)[: max(0, len(spans) - max_spans)]}
    groups: list[list[Span]] = []
    for kind, neighbours in kinds.items():
        for index, span in enumerate(neighbours):
            if (kind, index) in closed:
                groups[-1].append(span)
            else:
                groups.append([span])
    return sorted(map(_merged, groups), key=lambda span: (span.service, span.start, span.phase))


def _merged(group: Sequence[Span]) -> Span:
    first = group[0]
    end, count = max(span.end for span in group), sum(span.count for span in group)
    return Span(first.service, first.phase, first.start, end, count)
