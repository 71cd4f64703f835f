"""Prometheus metrics of the sessions of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quartet.errors import QuartetError

STATUS_CLASSES = ("2xx", "4xx", "5xx")
"""Classes that are shown from the start: Prometheus does not see an increase in a counter whose first sample is 1."""


class TrafficMetrics(Collector):
    """Requests that a generator has answered, and the sessions of its run that wait."""

    def __init__(self, requests: Callable[[], Mapping[str, int]], waiting: Callable[[], Mapping[str, int]]) -> None:
        """``requests`` returns the number of responses by class of their status, ``waiting`` that of sessions by state.

        ``waiting`` may raise a QuartetError.
        """
        self._requests, self._waiting = requests, waiting

    def collect(self) -> Iterator[Metric]:
        """Read the numbers."""
        requests = CounterMetricFamily(
            "quartet_traffic_requests", "Requests of users and operators, by class of the status.", labels=("status",)
        )
        for status, count in (dict.fromkeys(STATUS_CLASSES, 0) | dict(self._requests())).items():
            requests.add_metric((status,), count)
        yield requests
        sessions = GaugeMetricFamily(
            "quartet_traffic_sessions",
            "Sessions of the run that wait: open ones for a reward, rewarded ones for a step.",
            labels=("state",),
        )
        try:
            waiting = self._waiting()
        except QuartetError:
            return  # An unreachable buffer has no sessions; 0 would be wrong.
        for state, count in waiting.items():
            sessions.add_metric((state,), count)
        yield sessions
