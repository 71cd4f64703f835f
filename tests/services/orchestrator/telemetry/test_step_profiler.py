"""One span feeds three exporters: step seconds, timeline and traces. The timeline merges spans if there are many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.contract.update import UpdateResult
from quartet.contract.weights import PublishedWeights
from quartet.errors import ServiceUnavailable
from quartet.services.orchestrator.telemetry.step_profiler import (
    MAX_GENERATORS,
    MAX_SPANS,
    OTHER_GENERATORS,
    Span,
    StepProfiler,
    join_generators,
    merge_neighbours,
)
from tests.services.orchestrator.fake_services import FakeCall


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
    [span] = profiler.end_step(started)
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
    [span] = profiler.end_step(started)
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
    assert [span.phase for span in profiler.end_step(started)] == ["lease"]


def test_repeated_spans_of_a_phase_add_up() -> None:
    profiler = StepProfiler()
    seconds = []
    for _ in range(3):
        with profiler.span("redis", "lease") as timer:
            pass
        seconds.append(timer.seconds)
    assert profiler.take_seconds()["lease_seconds"] == pytest.approx(sum(seconds))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Call(FakeCall):
    """A call whose completion callback the test runs."""

    def add_done_callback(self, callback: object) -> None:
        self.callback = callback

    def end(self) -> None:
        self.complete()
        self.callback(self)  # type: ignore[operator]


def watch(profiler: StepProfiler, service: str, phase: str, result: Any = None) -> Call:
    call = Call(lambda: result)
    profiler.observe(service, phase, call)  # type: ignore[arg-type]
    return call


def update_result(seconds: float) -> UpdateResult:
    return UpdateResult(1, 1, {}, PublishedWeights(1, bytes(16), 1, 8, seconds))


def test_the_end_of_an_update_is_the_publication() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    update = watch(profiler, "actor", "update", update_result(3.0))
    clock.now = 110.0
    update.end()
    spans = [(span.phase, span.start, span.end) for span in profiler.end_step(100.0)]
    assert spans == [("update", 0.0, 7.0), ("publish", 7.0, 10.0)]
    # The recorded result of a repeated request names a publication that the call has not waited for.
    update = watch(profiler, "actor", "update", update_result(3.0))
    clock.now = 111.0
    update.end()
    assert [(span.phase, span.start, span.end) for span in profiler.end_step(110.0)][-1] == ("publish", 0.0, 1.0)


def test_exposed_seconds_are_those_of_weights_beside_which_nothing_but_generations_ran() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    assert profiler.take_calls().exposed == 0.0
    calls = {
        "actor": watch(profiler, "actor", "update", update_result(4.0)),
        "critic": watch(profiler, "critic", "update"),
    }
    times = {"critic": 106.0, "actor": 109.0}
    for name, now in times.items():
        clock.now = now
        calls[name].end()
    # Published from 105 to 109, and the critic trained to 106.
    loads = [watch(profiler, f"generator {index}", "update_weights") for index in range(2)]
    with profiler.span("orchestrator", "commit"):
        clock.now = 111.0
    loads[0].end()
    generation = watch(profiler, "generator 0", "generate")
    profiler.end_step(100.0)
    assert profiler.take_calls().exposed == pytest.approx(3.0 + 2.0)
    clock.now = 112.0
    loads[1].end()
    clock.now = 120.0
    generation.end()
    # The rest of the load in the next step.
    assert profiler.take_calls().exposed == pytest.approx(1.0)
    assert profiler.take_calls().exposed == 0.0


def test_a_failed_update_has_no_publication() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    update: Future[UpdateResult] = Future()
    profiler.observe("actor", "update", update)
    clock.now = 103.0
    update.set_exception(ServiceUnavailable("actor"))
    assert [span.phase for span in profiler.end_step(100.0)] == ["update"]
    assert profiler.take_calls().exposed == 0.0


def test_calls_and_blocks_are_relative_to_the_start_of_the_step() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    clock.now = 101.0
    generation = watch(profiler, "actor", "generate")
    clock.now = 102.0
    scores = watch(profiler, "reward", "score")
    clock.now = 102.5
    scores.end()
    clock.now = 103.0
    generation.end()
    with profiler.span("orchestrator", "prepare"):
        clock.now = 103.25
    assert profiler.end_step(100.0) == [
        Span("actor", "generate", 1.0, 3.0),
        Span("orchestrator", "prepare", 3.0, 3.25),
        Span("reward", "score", 2.0, 2.5),
    ]
    assert profiler.end_step(100.0) == []


def test_a_call_across_two_steps_is_part_of_both() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    saving = watch(profiler, "actor", "checkpoint")
    clock.now = 110.0
    assert profiler.end_step(104.0) == [Span("actor", "checkpoint", 0.0, 6.0)]
    clock.now = 113.0
    saving.end()
    clock.now = 120.0
    assert profiler.end_step(111.0) == [Span("actor", "checkpoint", 0.0, 2.0)]
    assert profiler.end_step(111.0) == []


def test_a_block_that_ended_before_the_step_is_excluded() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)

    def fail() -> None:
        clock.now = 101.0
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"), profiler.span("redis", "seal"):
        fail()
    clock.now = 105.0
    assert profiler.end_step(103.0) == []


def test_a_response_ends_its_span_before_the_callback_runs() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    call = watch(profiler, "actor", "update")
    call.complete()
    clock.now = 101.0
    assert profiler.end_step(100.0) == [Span("actor", "update", 0.0, 1.0)]
    clock.now = 102.0
    call.end()
    assert profiler.end_step(100.0) == []


def test_neighbours_of_one_kind_are_merged_over_the_smallest_gaps() -> None:
    spans = [Span("reward", "score", start, start + 1.0) for start in (0.0, 1.1, 5.0, 6.5)]
    spans.append(Span("critic", "values", 1.05, 1.06))
    assert merge_neighbours(spans, 5) == sorted(spans, key=lambda span: (span.service, span.start))
    assert merge_neighbours(spans, 3) == [
        Span("critic", "values", 1.05, 1.06),
        Span("reward", "score", 0.0, 2.1, 2),
        Span("reward", "score", 5.0, 7.5, 2),
    ]
    # At least one span of each kind remains.
    assert merge_neighbours(spans, 0) == [Span("critic", "values", 1.05, 1.06), Span("reward", "score", 0.0, 7.5, 4)]


def test_overlapping_calls_are_merged_first() -> None:
    spans = [Span("reward", "score", 0.0, 9.0), Span("reward", "score", 1.0, 2.0), Span("reward", "score", 9.5, 10.0)]
    assert merge_neighbours(spans, 2) == [Span("reward", "score", 0.0, 9.0, 2), Span("reward", "score", 9.5, 10.0)]


def test_a_step_with_many_calls_has_few_spans_and_counts_every_call() -> None:
    profiler = StepProfiler()
    started = time.perf_counter()

    def work(service: str) -> None:
        for _ in range(1000):
            watch(profiler, service, "score").end()

    threads = [threading.Thread(target=work, args=(service,)) for service in ("reward", "reference")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = profiler.end_step(started)
    assert len(spans) == MAX_SPANS
    assert sum(span.count for span in spans) == 2000
    assert {span.service for span in spans} == {"reward", "reference"}


def test_generators_that_finish_last_keep_their_spans() -> None:
    spans = [Span(f"generator host:{port}", "generate", 0.0, float(port)) for port in range(4)] + [
        Span("actor", "update", 4.0, 5.0)
    ]
    joined = join_generators(spans, 2)
    assert [span.service for span in joined] == [
        OTHER_GENERATORS,
        OTHER_GENERATORS,
        "generator host:2",
        "generator host:3",
        "actor",
    ]
    assert join_generators(spans, 4) == spans


def test_the_spans_of_many_generators_are_bounded() -> None:
    clock = Clock()
    profiler = StepProfiler(clock=clock)
    for port in range(256):
        for phase in ("update_weights", "generate", "generate"):
            call = watch(profiler, f"generator host:{port}", phase)
            clock.now += 0.001
            call.end()
    spans = profiler.end_step(100.0)
    assert len(spans) <= MAX_SPANS
    assert len({span.service for span in spans}) == MAX_GENERATORS + 1
    assert sum(span.count for span in spans) == 3 * 256
