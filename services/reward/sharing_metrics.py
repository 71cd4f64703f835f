"""Prometheus metrics of a reward service that several runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.services.reward.sharing import RunUsage


class SharingMetrics(Collector):
    """Numbers of each run. There are at most ``services.reward.sharing.max_runs``; a run that is forgotten starts at 0 again."""

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
