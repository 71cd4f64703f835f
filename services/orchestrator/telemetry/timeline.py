"""What each process did during a step, and when: what a reader needs to see what waited for what."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quartet.rpc.clients import PendingResult

MOST = 200
"""Spans that are kept of a step. Neighbours of one kind are joined where there are more."""
DIGITS = 6
"""Of seconds."""

Watch = Callable[[str, str, PendingResult[Any]], None]
"""Is told of a call that has been begun: at which service, and in which phase."""


def unwatched(service: str, phase: str, call: PendingResult[Any]) -> None:
    """A ``Watch`` that does not care."""


@dataclass(frozen=True, slots=True)
class Span:
    """``count`` calls of one phase at one service; ``start`` and ``end`` are seconds after the step's start."""

    service: str
    phase: str
    start: float
    end: float
    count: int = 1

    def row(self) -> dict[str, Any]:
        """As a line of ``timeline.jsonl`` has it."""
        start, end = round(self.start, DIGITS), round(self.end, DIGITS)
        return {"service": self.service, "phase": self.phase, "start": start, "end": end, "count": self.count}


@dataclass(slots=True)
class _Work:
    """Something that is done, by the timeline's clock; ``end`` is None while it goes on."""

    service: str
    phase: str
    start: float
    call: PendingResult[Any] | None
    end: float | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None


class Timeline:
    """The work of the step in hand. Thread-safe: a call's end is noted by the thread that takes its answer in."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` gives seconds, by which the steps' starts are told, too."""
        self._clock = clock
        self._lock = threading.Lock()
        self._works: list[_Work] = []

    def watch(self, service: str, phase: str, call: PendingResult[Any]) -> None:
        """Notes a call that has been begun just now, and when its answer, or its failure, is there."""
        work = self._begin(service, phase, call)
        call.when_done(lambda: self._end(work))

    @contextmanager
    def part(self, service: str, phase: str) -> Iterator[None]:
        """Notes what is done inside, also where that fails."""
        work = self._begin(service, phase, None)
        try:
            yield
        finally:
            self._end(work)

    def lap(self, started: float) -> list[Span]:
        """What was done since ``started``, at most MOST spans, by service and start; what goes on counts up to now.

        The next lap has what is done after this one, and the rest of what goes on.
        """
        with self._lock:
            now = self._clock()
            for work in self._works:
                # Whoever waited for the call may be here before the thread that notes its end.
                if work.end is None and work.call is not None and work.call.done():
                    work.end = now
            works, self._works = self._works, [work for work in self._works if not work.ended]
            spans = [
                Span(work.service, work.phase, max(0.0, work.start - started), (work.end or now) - started)
                for work in works
                if (work.end or now) > started
            ]
        return joined(spans, MOST)

    def _begin(self, service: str, phase: str, call: PendingResult[Any] | None) -> _Work:
        with self._lock:
            work = _Work(service, phase, self._clock(), call)
            self._works.append(work)
        return work

    def _end(self, work: _Work) -> None:
        with self._lock:
            if work.end is None:
                work.end = self._clock()


def joined(spans: Sequence[Span], most: int) -> list[Span]:
    """The spans by service and start, neighbours of one service and phase joined over the smallest gaps until few enough.

    There are at least as many as there are kinds.
    """
    kinds: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        kinds[span.service, span.phase].append(span)
    gaps = []
    for kind, neighbours in kinds.items():
        end = neighbours[0].end
        for place, span in enumerate(neighbours[1:], 1):
            gaps.append((span.start - end, kind, place))
            end = max(end, span.end)
    closed = {(kind, place) for _, kind, place in sorted(gaps)[: max(0, len(spans) - most)]}
    groups: list[list[Span]] = []
    for kind, neighbours in kinds.items():
        for place, span in enumerate(neighbours):
            if (kind, place) in closed:
                groups[-1].append(span)
            else:
                groups.append([span])
    return sorted(map(_whole, groups), key=lambda span: (span.service, span.start, span.phase))


def _whole(group: Sequence[Span]) -> Span:
    """Neighbours as one span."""
    first = group[0]
    end, count = max(span.end for span in group), sum(span.count for span in group)
    return Span(first.service, first.phase, first.start, end, count)
