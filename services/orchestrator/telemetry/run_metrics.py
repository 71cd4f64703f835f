"""Prometheus metrics of a run: its progress, the metrics of its last step, and totals since the process started."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.buffer.connection import connect
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.guards import GuardConfig, GuardsConfig
from quartet.config.root import Config
from quartet.contract.control import Alert, RunState
from quartet.contract.logged_values import PREFIX as LOGGED_PREFIX
from quartet.contract.status import GeneratorInfo, GeneratorState
from quartet.errors import QuartetError
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.telemetry.step_metrics import definition_of

PREFIX = "quartet_"
BUFFER_TIMEOUT_SECONDS = 1.0
"""Time for the buffer to return its depth during a scrape."""
GUARDS = tuple(
    name
    for name, field in GuardsConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, GuardConfig)
)
PHASE_SUFFIX = "_seconds"
"""Suffix of the step metrics that hold the seconds of a phase."""


def buffer_depth(url: str, run: str) -> Callable[[], int]:
    """Return a function that counts the trajectories in a run's rollout stream. Its first call opens a separate connection.

    It raises a QuartetError if the buffer does not respond in time.
    """
    stream = cache(lambda: RolloutStream(connect(url, BUFFER_TIMEOUT_SECONDS), url, run))
    return lambda: stream().depth()


class RunMetrics(Collector):
    """Collector of a run's metrics: the board reports steps and alerts, and a scrape reads the rest."""

    def __init__(
        self,
        config: Config,
        board: ProgressBoard,
        depth: Callable[[], int],
        generators: Callable[[], Sequence[GeneratorInfo]] = tuple,
    ) -> None:
        """``depth`` returns the trajectories in the buffer. It may raise a QuartetError.

        ``generators`` returns those in separate processes.
        """
        self._board, self._depth, self._generators = board, depth, generators
        self._run = config.run.name
        self._per_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        controller = config.algorithm.kl_controller
        self._kl_target = None if controller.kind == "fixed" else controller.target
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._steps = self._failed_trajectories = 0
        self._phases: defaultdict[str, float] = defaultdict(float)
        # All labels exist from the start: Prometheus does not see an increase in a counter whose first sample is 1.
        self._alerts: Counter[str] = Counter(dict.fromkeys(GUARDS, 0))
        self._committed = time.time()
        board.observer = self

    def step(self, metrics: dict[str, float]) -> None:
        """Record a committed step."""
        with self._lock:
            self._metrics, self._committed = metrics, time.time()
            self._steps += 1
            self._failed_trajectories += int(metrics.get("failed_trajectories", 0))
            for name, value in metrics.items():
                if name.endswith(PHASE_SUFFIX) and not name.startswith(LOGGED_PREFIX) and math.isfinite(value):
                    self._phases[name.removesuffix(PHASE_SUFFIX)] += value

    def alert(self, alert: Alert) -> None:
        """Record an alert."""
        with self._lock:
            self._alerts[alert.guard] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, labelled with the run's name."""
        progress = self._board.current()
        yield self._gauge("step", "The last committed step.", progress.step)
        yield self._gauge("total_steps", "Steps of the whole run.", progress.total_steps)
        state = GaugeMetricFamily(
            "quartet_run_state", "1 for the current state of the run, 0 for the others.", labels=("run", "state")
        )
        for possible in RunState:
            state.add_metric((self._run, possible), float(progress.state is possible))
        yield state
        yield self._gauge(
            "trajectories_scored", "Trajectories of the current step that have been scored.", progress.num_scored
        )
        yield self._gauge("trajectories_expected", "Trajectories that the current step needs.", progress.num_expected)
        yield self._counter("recoveries", "Failures that the run recovered from.", progress.recoveries)
        yield self._generator_states()
        with self._lock:
            totals = list(self._totals())
        yield from totals
        yield from self._buffer()

    def _generator_states(self) -> Metric:
        # Not quartet_generators, which is the step metric.
        family = GaugeMetricFamily(
            "quartet_generator_state", "Generators in separate processes, by state.", labels=("run", "state")
        )
        if generators := self._generators():
            counts = Counter(each.state for each in generators)
            for state in GeneratorState:
                family.add_metric((self._run, state), counts[state])
        return family

    def _totals(self) -> Iterator[Metric]:
        yield self._gauge(
            "last_commit_timestamp_seconds",
            "Time of the last commit, or of the start of this process, in seconds since 1970.",
            self._committed,
        )
        if self._kl_target is not None:
            yield self._gauge(
                "kl_target", "Target of the adaptive KL controller, in nats per response.", self._kl_target
            )
        yield self._counter("steps", "Steps committed by this process.", self._steps)
        yield self._counter("trajectories", "Trajectories trained on by this process.", self._steps * self._per_step)
        yield self._counter("trajectory_failures", "Trajectories that could not be scored.", self._failed_trajectories)
        yield self._counters("phase_seconds", "Seconds of committed steps, by phase.", "phase", self._phases)
        yield self._counters("alerts", "Alerts raised by the guards.", "guard", self._alerts)
        for name, value in self._metrics.items():
            if name != "step":
                text = f"{name} of the last committed step."
                if (definition := definition_of(name)) is not None:
                    text = f"{definition.meaning} Unit: {definition.unit or 'none'}. Of the last committed step."
                yield self._gauge(name, text, value)

    def _buffer(self) -> Iterator[Metric]:
        try:
            depth = self._depth()
        except QuartetError:
            return  # An unreachable buffer has no depth; 0 would be wrong.
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
