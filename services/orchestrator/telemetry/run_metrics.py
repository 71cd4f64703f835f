"""A run's figures for Prometheus: where it stands, the metrics of its last step, and what has come together since the start."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.buffer.connection import connect
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config, GuardsConfig
from quartet.errors import QuartetError
from quartet.services.orchestrator.control.progress import ProgressBoard, RunState
from quartet.types import Alert

PREFIX = "quartet_"
SCRAPE = 1.0
"""Seconds that the buffer has to say how much waits in it, when somebody reads the figures."""
GUARDS = tuple(name for name in GuardsConfig.model_fields if name != "window_steps")
PHASE = "seconds_"
"""A step's metrics of this name are the seconds of its phases."""


class Depth:
    """Trajectories that wait in a run's rollout stream, over a connection of its own, made when it is first asked."""

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url, run
        self._stream: RolloutStream | None = None

    def __call__(self) -> int:
        """Asks the buffer. Raises a domain exception where it does not answer in time."""
        if self._stream is None:
            self._stream = RolloutStream(connect(self._url, SCRAPE), self._url, self._run)
        return self._stream.depth()


class RunMetrics(Collector):
    """Hears of every committed step and alert from the board, and reads the rest when it is asked."""

    def __init__(self, config: Config, board: ProgressBoard, depth: Callable[[], int]) -> None:
        """``depth`` gives the trajectories that wait in the buffer; it may raise a domain exception."""
        self._board, self._depth = board, depth
        self._run = config.run.name
        self._per_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        controller = config.algorithm.kl_controller
        self._kl_target = None if controller.kind == "fixed" else controller.target
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._steps = self._failed_trajectories = 0
        self._phases: defaultdict[str, float] = defaultdict(float)
        # All of them from the start: a counter that begins at 1 has not risen, for Prometheus.
        self._alerts: Counter[str] = Counter(dict.fromkeys(GUARDS, 0))
        self._committed = time.time()
        board.observer = self

    def step(self, metrics: dict[str, float]) -> None:
        """Takes in a committed step."""
        with self._lock:
            self._metrics, self._committed = metrics, time.time()
            self._steps += 1
            self._failed_trajectories += int(metrics.get("failed_trajectories", 0))
            for name, value in metrics.items():
                if name.startswith(PHASE) and math.isfinite(value):
                    self._phases[name.removeprefix(PHASE)] += value

    def alert(self, alert: Alert) -> None:
        """Takes in what a guard found."""
        with self._lock:
            self._alerts[alert.guard] += 1

    def collect(self) -> Iterator[Metric]:
        """All of it, each with the run's name."""
        progress = self._board.current()
        yield self._gauge("step", "The last committed step.", progress.step)
        yield self._gauge("total_steps", "Steps that the run is to take.", progress.total_steps)
        state = GaugeMetricFamily("quartet_run_state", "1 for the state that the run is in.", labels=("run", "state"))
        for possible in RunState:
            state.add_metric((self._run, possible), float(progress.state is possible))
        yield state
        yield self._gauge("scored", "Trajectories of the step in hand that have been scored.", progress.scored)
        yield self._gauge("wanted", "Trajectories that the step in hand needs.", progress.wanted)
        yield self._counter("recoveries", "Failures that the run went back from.", progress.recoveries)
        with self._lock:
            found = list(self._totals())
        yield from found
        yield from self._buffer()

    def _totals(self) -> Iterator[Metric]:
        yield self._gauge(
            "last_commit_timestamp_seconds",
            "When a step was committed last, or else this process began, seconds since 1970.",
            self._committed,
        )
        if self._kl_target is not None:
            yield self._gauge(
                "kl_target", "What the adaptive KL controller steers at, nats per response.", self._kl_target
            )
        yield self._counter("steps", "Steps committed by this process.", self._steps)
        yield self._counter("trajectories", "Trajectories trained on by this process.", self._steps * self._per_step)
        yield self._counter("failed_trajectories", "Trajectories that could not be scored.", self._failed_trajectories)
        yield self._counters("phase_seconds", "Seconds of committed steps, by phase.", "phase", self._phases)
        yield self._counters("alerts", "What the guards found.", "guard", self._alerts)
        for name, value in self._metrics.items():
            if name != "step":
                yield self._gauge(name, f"{name} of the last committed step, as in metrics.jsonl.", value)

    def _buffer(self) -> Iterator[Metric]:
        try:
            depth = self._depth()
        except QuartetError:
            return  # Not there is not 0.
        yield self._gauge("buffer_depth", "Trajectories in the rollout stream that are not acknowledged yet.", depth)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("run",))
        family.add_metric((self._run,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=("run",))
        family.add_metric((self._run,), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=("run", label))
        for value, number in values.items():
            family.add_metric((self._run, value), number)
        return family
