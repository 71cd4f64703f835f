"""Summary of the events of a profiler: operators with the most time, gaps, and communication that no computation hides."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from quartet.contract.profile import Gap, OperatorTime, ProfileSummary

WORK_PREFIX = "quartet: "
"""Begin of the annotation around a call; its kind of work follows."""
MAX_ROWS = 15
"""Largest number of operators, and of kernels, in a summary."""
MAX_GAPS = 5
_COLLECTIVE = re.compile(r"(gloo|nccl|mpi|c10d|_c10d_functional)(:|Dev|Kernel|_)|record_param_comms", re.ASCII)
SECOND = 1e9
Interval = tuple[int, int]


class TraceEvent(NamedTuple):
    """An event of a trace. Times are in nanoseconds. An operator calls those that lie within it on its thread."""

    name: str
    start: int
    end: int
    thread: int = 0
    kind: Literal["operator", "kernel", "annotation"] = "operator"

    @property
    def is_collective(self) -> bool:
        """Return whether this is communication between ranks, by its name."""
        return _COLLECTIVE.match(self.name) is not None


def summarise(events: Iterable[TraceEvent], seconds: float, cut_off: bool = False) -> ProfileSummary:
    """Return the summary of the events of one process. ``seconds``: duration of the profile."""
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    kernels = [event for event in ordered if event.kind == "kernel"]
    operators = [event for event in ordered if event.kind == "operator"]
    calls = [event for event in ordered if event.kind == "annotation" and event.name.startswith(WORK_PREFIX)]
    computing = [event for event in kernels or operators if not event.is_collective]
    sending = [event for event in ordered if event.is_collective and (event.kind == "kernel" or not kernels)]
    compute, communication = union(computing), union(sending)
    if not kernels:
        # An operator does not compute while a collective that it has called blocks its thread.
        compute = _difference(compute, union(event for event in sending if event.kind == "operator"))
    work: Counter[str] = Counter()
    for call in calls:
        work[call.name.removeprefix(WORK_PREFIX)] += call.end - call.start
    gaps = _gaps(sorted((*computing, *sending), key=lambda event: event.start), calls)
    exposed = _total(communication) - _total(_intersection(communication, compute))
    return ProfileSummary(
        device="cuda" if kernels else "cpu",
        seconds=seconds,
        work_seconds={kind: nanoseconds / SECOND for kind, nanoseconds in work.most_common()},
        compute_seconds=_total(compute) / SECOND,
        gap_seconds=sum(gap.seconds for gap in gaps),
        communication_seconds=_total(communication) / SECOND,
        exposed_communication_seconds=exposed / SECOND,
        kernels=_times((event.name, event.end - event.start) for event in kernels),
        operators=_times(_self_times(operators)),
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:MAX_GAPS]),
        cut_off=cut_off,
    )


def union(events: Iterable[TraceEvent]) -> list[Interval]:
    """Return the times that events, in the order of their starts, cover together."""
    covered: list[Interval] = []
    for event in events:
        if covered and event.start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], event.end)
        else:
            covered.append((event.start, event.end))
    return covered


def _intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the times that two unions have in common."""
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the times of a union without those of another one."""
    if not left:
        return []
    edges = [left[0][0], *(edge for interval in right for edge in interval), left[-1][1]]
    outside = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return _intersection(left, outside)


def _total(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _gaps(events: Sequence[TraceEvent], calls: Sequence[TraceEvent]) -> list[Gap]:
    """Return the times within calls that no event covers. Events and calls are in the order of their starts."""
    gaps, at = [], 0
    for call in calls:
        now, after = call.start, ""
        while at < len(events) and events[at].start < call.end:
            event = events[at]
            at += 1
            if event.end <= call.start:
                continue
            if event.start > now:
                gaps.append(Gap(after, event.name, (event.start - now) / SECOND))
            if event.end > now:
                now, after = event.end, event.name
        if call.end > now:
            gaps.append(Gap(after, "", (call.end - now) / SECOND))
    return gaps


def _self_times(operators: Iterable[TraceEvent]) -> Iterable[tuple[str, int]]:
    """Yield each operator's name and its time without that of the operators within it on the same thread."""
    stacks: defaultdict[int, list[tuple[TraceEvent, list[int]]]] = defaultdict(list)
    for event in operators:
        stack = stacks[event.thread]
        while stack and stack[-1][0].end <= event.start:
            yield _self_time(*stack.pop())
        if stack:
            stack[-1][1][0] += event.end - event.start
        stack.append((event, [0]))
    for stack in stacks.values():
        yield from (_self_time(*entry) for entry in stack)


def _self_time(event: TraceEvent, within: list[int]) -> tuple[str, int]:
    return event.name, max(0, event.end - event.start - within[0])


def _times(events: Iterable[tuple[str, int]]) -> tuple[OperatorTime, ...]:
    nanoseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, time in events:
        nanoseconds[name] += time
        calls[name] += 1
    return tuple(OperatorTime(name, calls[name], time / SECOND) for name, time in nanoseconds.most_common(MAX_ROWS))
