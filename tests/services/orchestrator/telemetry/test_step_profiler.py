"""One span feeds three exporters: step seconds, timeline and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler


class RecordedTraces:
    """Step traces that record the names of their spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.names.append(f"step {step}")
        yield

    @contextmanager
    def span(self, service: str, phase: str) -> Iterator[None]:
        self.names.append(f"{service} {phase}")
        yield


def test_a_span_reaches_all_three_exporters() -> None:
    traces = RecordedTraces()
    profiler = StepProfiler(traces)
    started = time.perf_counter()
    with profiler.step(4), profiler.span("redis", "seal") as timer:
        time.sleep(0.01)
    assert traces.names == ["step 4", "redis seal"]
    [span] = profiler.timeline.end_step(started)
    assert (span.service, span.phase) == ("redis", "seal")
    assert timer.seconds >= 0.01
    assert profiler.take_seconds() == {"seal_seconds": timer.seconds}
    assert profiler.take_seconds() == {}


def test_a_waiting_span_is_a_wait_on_the_timeline_and_keeps_its_phase_elsewhere() -> None:
    traces = RecordedTraces()
    profiler = StepProfiler(traces)
    started = time.perf_counter()
    with profiler.span("orchestrator", "update", waits=True):
        time.sleep(0.001)
    [span] = profiler.timeline.end_step(started)
    assert (span.service, span.phase) == ("orchestrator", "wait")
    assert traces.names == ["orchestrator update"]
    assert set(profiler.take_seconds()) == {"update_seconds"}


def test_a_failed_span_is_measured_and_raises() -> None:
    profiler = StepProfiler()
    started = time.perf_counter()

    def fail() -> None:
        time.sleep(0.001)
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"), profiler.span("redis", "lease"):
        fail()
    assert set(profiler.take_seconds()) == {"lease_seconds"}
    assert [span.phase for span in profiler.timeline.end_step(started)] == ["lease"]


def test_repeated_spans_of_a_phase_add_up() -> None:
    profiler = StepProfiler()
    seconds = []
    for _ in range(3):
        with profiler.span("redis", "lease") as timer:
            pass
        seconds.append(timer.seconds)
    assert profiler.take_seconds()["lease_seconds"] == pytest.approx(sum(seconds))
