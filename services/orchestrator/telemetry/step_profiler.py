"""Profiling of steps: one span per block of work, exported as step seconds, timeline and OpenTelemetry traces."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from quartet.services.orchestrator.telemetry.timeline import Timeline
from quartet.telemetry.traces import NoTraces, StepTraces

CallObserver = Callable[[str, str, Future[Any]], None]
"""Function that receives a call that has just started: the service, the phase and the pending result."""


def ignore_call(service: str, phase: str, call: Future[Any]) -> None:
    """Do nothing: a ``CallObserver`` for callers without a profiler."""


@dataclass(slots=True)
class SpanTimer:
    """Duration of a span in seconds, set when the span ends."""

    seconds: float = 0.0


class StepProfiler:
    """Profiler of the training thread's blocks in each step, and of the calls that they start."""

    def __init__(self, traces: StepTraces | None = None) -> None:
        """``traces`` export every step as one trace. Defaults to no traces."""
        self.timeline = Timeline()
        self._traces = traces or NoTraces()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return a context around a whole step, which is the root of its trace. Drops the seconds of a failed attempt."""
        self._seconds.clear()
        return self._traces.step(step)

    @contextmanager
    def span(self, service: str, phase: str, waits: bool = False) -> Iterator[SpanTimer]:
        """Measure the block inside, also if it fails.

        ``service`` is the process that works. With ``waits``, the block waits for the calls of other services; the timeline shows
        it as a wait.
        """
        timer, start = SpanTimer(), time.perf_counter()
        try:
            with self.timeline.span(service, "wait" if waits else phase), self._traces.span(service, phase):
                yield timer
        finally:
            timer.seconds = time.perf_counter() - start
            self._seconds[phase] += timer.seconds

    def observe(self, service: str, phase: str, call: Future[Any]) -> None:
        """Record a call that has just started on the timeline, until its response arrives or it fails."""
        self.timeline.observe(service, phase, call)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as ``PHASE_seconds``."""
        seconds = {f"{phase}_seconds": value for phase, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
