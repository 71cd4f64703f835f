"""Quotas and turns of the runs that share a reward service.

A call is admitted or refused at once. Admitted calls compute one unit of work at a time, in turns: the next turn goes to the run
that has used the least weighted time. Runs over their quota have a low weight, so that they take little from the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.config.deployment import SharingConfig
from quartet.errors import InvalidRequest, QuotaExceeded

OVER_QUOTA_SECONDS = 10.0
"""Time for which a run counts as over its quota, after the time at which the refused caller should try again."""
CREDIT_SECONDS = 1.0
"""Time that a run saves at most while it is idle. It keeps its turn in the moment between two calls."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 30.0
"""Limits of the time after which a refused caller should try again."""
CROWDED_RETRY_SECONDS = 10.0
"""The same, for a run without a place among the runs of the service."""
UNNAMED = "unnamed"
"""Name of all callers together that give no run."""


class SharedCall:
    """A call that has been admitted. ``turn`` is set while it may compute a unit of work."""

    def __init__(self, run: _Run, sequences: int, now: float) -> None:
        self.run, self.sequences, self.started = run, sequences, now
        self.turn = threading.Event()


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Numbers of one run: responses that are pending and were scored, calls that were refused, seconds of work."""

    run: str
    pending_sequences: int
    scored_sequences: int
    refused_calls: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Run:
    name: str
    budget: float
    """Responses that may be admitted by the rate limit. Below 0 after a large call."""
    updated: float
    """Time of ``budget``."""
    calls: deque[SharedCall] = field(default_factory=deque)
    """Admitted calls, in order. The first one computes."""
    used: float = 0.0
    """Weighted seconds of work, on the virtual clock."""
    over_quota_until: float = 0.0
    """End of the time for which the run counts as over its quota because of a refused call."""
    refused_since_turn: bool = False
    """A call has been refused since the run's last turn began. The run counts as over its quota, however long the unit takes."""
    weight: float = 1.0
    """Weight of the unit in progress. It does not change during the unit."""
    call_seconds: float = 0.0
    """Duration of the last call that has ended."""
    scored_sequences: int = 0
    refused_calls: int = 0
    seconds: float = 0.0

    @property
    def pending_sequences(self) -> int:
        return sum(call.sequences for call in self.calls)


class SharedTurns:
    """The quotas of all runs, and the order of their work. One unit of work is computed at a time. Thread-safe."""

    def __init__(self, limits: SharingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is in seconds."""
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        # The run that was used last comes last.
        self._runs: dict[str, _Run] = {}
        self._current: SharedCall | None = None
        self._virtual = 0.0
        """Virtual time: ``used`` of the run with the last turn, when it got the turn."""

    def admit(self, name: str, sequences: int) -> SharedCall:
        """Admit a call with this number of responses for the run ``name``. ``leave`` must follow.

        Raises QuotaExceeded, and InvalidRequest for a call that the quotas never admit.
        """
        limit = self._limits.max_pending_sequences
        if sequences > limit:
            raise InvalidRequest(
                f"batch: {sequences} sequences; this shared service accepts at most {limit} in a call "
                "(services.reward.sharing.max_pending_sequences); send smaller batches"
            )
        with self._lock:
            now = self._clock()
            run = self._run(name or UNNAMED, now)
            self._check(run, sequences, now)
            if not run.calls:
                run.refused_since_turn = False
                run.used = max(run.used, self._virtual - CREDIT_SECONDS)
            run.budget -= sequences
            call = SharedCall(run, sequences, now)
            run.calls.append(call)
            self._give_turn()
            return call

    def end_turn(self, call: SharedCall, seconds: float) -> None:
        """Charge a unit of work to the call that has the turn, and give the next turn, maybe to the same call."""
        with self._lock:
            if call is not self._current:
                return
            run = call.run
            run.used += seconds / run.weight
            run.seconds += seconds
            call.turn.clear()
            self._current = None
            self._give_turn()

    def leave(self, call: SharedCall, scored: bool = True) -> None:
        """End a call. ``scored``: its responses have been scored. May be called again."""
        with self._lock:
            run = call.run
            if call not in run.calls:
                return
            run.calls.remove(call)
            run.call_seconds = self._clock() - call.started
            run.scored_sequences += call.sequences if scored else 0
            if call is self._current:
                call.turn.clear()
                self._current = None
                self._give_turn()

    def usage(self) -> list[RunUsage]:
        """Return the numbers of every known run."""
        with self._lock:
            return [
                RunUsage(run.name, run.pending_sequences, run.scored_sequences, run.refused_calls, run.seconds)
                for run in self._runs.values()
            ]

    def _run(self, name: str, now: float) -> _Run:
        run = self._runs.pop(name, None)
        if run is None:
            if len(self._runs) >= self._limits.max_runs:
                idle = next((each for each in self._runs.values() if not each.calls), None)
                if idle is None:
                    raise QuotaExceeded(
                        f"run {name}: {self._limits.max_runs} other runs use this shared service "
                        "(services.reward.sharing.max_runs); try again later",
                        CROWDED_RETRY_SECONDS,
                    )
                del self._runs[idle.name]
            run = _Run(name, float(self._limits.max_pending_sequences), now)
        self._runs[name] = run
        return run

    def _check(self, run: _Run, sequences: int, now: float) -> None:
        """Raise QuotaExceeded if a call of ``run`` with this number of responses exceeds a quota."""
        limits, reason = self._limits, ""
        wait = run.call_seconds
        pending = run.pending_sequences
        if len(run.calls) >= limits.max_pending_calls:
            reason = f"{len(run.calls)} calls are pending (max_pending_calls)"
        elif pending + sequences > limits.max_pending_sequences:
            reason = f"{pending} responses are pending, and the call has {sequences} (max_pending_sequences)"
        elif (rate := limits.sequences_per_second) is not None:
            burst = float(limits.max_pending_sequences)
            run.budget = min(burst, run.budget + rate * (now - run.updated))
            run.updated = now
            if run.budget <= 0:
                reason, wait = f"more than {rate:g} responses per second (sequences_per_second)", -run.budget / rate
        if not reason:
            return
        wait = min(max(wait, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        run.over_quota_until, run.refused_since_turn = now + wait + OVER_QUOTA_SECONDS, True
        run.refused_calls += 1
        raise QuotaExceeded(f"run {run.name}: {reason}; try again in {wait:.2g} s", wait)

    def _give_turn(self) -> None:
        """Give the turn to the run with the least used time, if no call has it."""
        if self._current is not None:
            return
        waiting = [run for run in self._runs.values() if run.calls]
        if waiting:
            run = min(waiting, key=lambda each: each.used)
            self._virtual = max(self._virtual, run.used)
            run.weight = self._weight(run)
            run.refused_since_turn = False
            self._current = run.calls[0]
            self._current.turn.set()

    def _is_over_quota(self, run: _Run) -> bool:
        return run.refused_since_turn or self._clock() < run.over_quota_until

    def _weight(self, run: _Run) -> float:
        """Return the share of ``run`` relative to a run within its quota, for the turn that it gets now.

        All runs over their quota together have ``over_quota_share``, even if there is only one other run.
        """
        if not self._is_over_quota(run):
            return 1.0
        share = self._limits.over_quota_share
        over = sum(1 for each in self._runs.values() if each.calls and self._is_over_quota(each))
        return share / (1 - share) / max(1, over)


class SharingMetrics(Collector):
    """Prometheus metrics of every run.

    There are at most ``services.reward.sharing.max_runs``; a run that is forgotten starts at 0 again.
    """

    def __init__(self, usage: Callable[[], Sequence[RunUsage]]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """Read the numbers of every run."""
        usage, labels = self._usage(), ("run",)
        pending = GaugeMetricFamily(
            "quartet_shared_pending_sequences", "Responses of a run that wait for scores.", labels=labels
        )
        scored = CounterMetricFamily(
            "quartet_shared_scored_sequences", "Responses of a run that were scored.", labels=labels
        )
        refused = CounterMetricFamily(
            "quartet_shared_refused_calls", "Calls of a run that exceeded a quota.", labels=labels
        )
        seconds = CounterMetricFamily("quartet_shared_seconds", "Seconds of work for a run.", labels=labels)
        for run in usage:
            pending.add_metric((run.run,), run.pending_sequences)
            scored.add_metric((run.run,), run.scored_sequences)
            refused.add_metric((run.run,), run.refused_calls)
            seconds.add_metric((run.run,), run.seconds)
        yield from (pending, scored, refused, seconds)
