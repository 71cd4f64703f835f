"""The compute thread: one task at a time, and none for a caller that has disconnected."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

import quartet.services.__main__ as services_main
from quartet.contract.status import Role
from quartet.errors import Cancelled, DeadlinePassed, EngineFailed, InvalidRequest, ServiceBusy, ServiceFailed
from quartet.rpc import compute_thread
from quartet.rpc.base_servicers import ModelServicer
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.limits import MAX_PENDING_WORK
from tests.waiting import LIMIT, wait_until


class Call:
    """A fake gRPC context of a caller."""

    def __init__(self, remaining: float | None = None) -> None:
        self._remaining = remaining
        self._callbacks: list[Callable[[], None]] = []
        self._ended = False

    def time_remaining(self) -> float | None:
        return self._remaining

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._ended:
            return False
        self._callbacks.append(callback)
        return True

    def end(self) -> None:
        self._ended = True
        for callback in self._callbacks:
            callback()


def test_idle_work_runs_after_a_call_and_its_failure_but_not_between_pending_calls() -> None:
    idle: list[str] = []
    compute = ComputeThread(on_idle=lambda: idle.append("idle"))
    compute.run("work", Call(), lambda _: idle.append("work"))
    assert idle == ["work", "idle"]
    with pytest.raises(InvalidRequest):
        compute.run("work", Call(), lambda _: failing())
    assert idle == ["work", "idle", "idle"]
    started, proceed = threading.Event(), threading.Event()

    def waiting(_: Callable[[], bool]) -> None:
        started.set()
        assert proceed.wait(LIMIT)

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(compute.run, "work", Call(), waiting)
        assert started.wait(LIMIT)
        second = callers.submit(compute.run, "work", Call(), lambda _: len(idle))
        wait_until(lambda: compute.pending() == 2)
        proceed.set()
        first.result()
        assert second.result() == 3
    assert len(idle) == 4


def test_idle_work_does_not_wait_for_callers_that_have_not_read_their_result() -> None:
    idle: list[str] = []
    compute = ComputeThread(on_idle=lambda: idle.append("idle"))
    unread = compute.stream("work", Call(), lambda _, emit: "result")
    assert next(unread) == "result"
    compute.run("work", Call(), lambda _: None)
    assert len(idle) == 2


def failing() -> None:
    raise InvalidRequest("wrong")


def test_the_initializer_runs_once_in_the_compute_thread() -> None:
    threads: list[int] = []
    compute = ComputeThread(lambda: threads.append(threading.get_ident()))
    assert threads == []
    used = [compute.run("work", Call(), lambda _: threading.get_ident()) for _ in range(2)]
    assert threads == used[:1] == used[1:]
    assert used[0] != threading.get_ident()


def wait_for_cancellation(cancelled: Callable[[], bool]) -> bool:
    """Wait until the work is cancelled; return whether it was within the time limit."""
    deadline = time.monotonic() + 5
    while not cancelled():
        if time.monotonic() > deadline:
            return False
    return True


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


def test_run_returns_the_result_and_raises_the_error_of_the_work(compute: ComputeThread) -> None:
    assert compute.run("a", Call(), lambda _: 7) == 7

    def fail(_: Callable[[], bool]) -> None:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest, match="wrong"):
        compute.run("b", Call(), fail)
    busy = compute.busy_seconds()
    assert set(busy) == {"a", "b"}
    assert min(busy.values()) > 0


def test_running_work_counts_as_busy_until_now(compute: ComputeThread) -> None:
    def work(_: Callable[[], bool]) -> tuple[float, float]:
        return compute.busy_seconds()["a"], compute.busy_seconds()["a"]

    first, second = compute.run("a", Call(), work)
    assert 0 < first < second <= compute.busy_seconds()["a"]


def test_work_runs_one_task_at_a_time_in_arrival_order_on_one_thread(compute: ComputeThread) -> None:
    started, release, running, max_running, order, threads = threading.Event(), threading.Event(), 0, 0, [], set()

    def work(number: int) -> None:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        if number == 0:
            started.set()
            assert release.wait(LIMIT)
        order.append(number)
        threads.add(threading.current_thread().name)
        running -= 1

    with ThreadPoolExecutor(MAX_PENDING_WORK) as callers:
        calls = []
        for number in range(MAX_PENDING_WORK):
            caller = Call()
            calls.append(callers.submit(compute.run, "w", caller, lambda _, n=number: work(n)))
            # The first call runs and is no longer queued. Each later call is made after the one before it is queued.
            assert started.wait(LIMIT)
            wait_until(lambda: compute._executor._work_queue.qsize() == number)  # noqa: B023
        release.set()
        for call in calls:
            call.result(timeout=LIMIT)
    assert max_running == 1
    assert order == list(range(MAX_PENDING_WORK))
    assert len(threads) == 1


def test_callers_beyond_the_limit_are_refused_at_once(compute: ComputeThread) -> None:
    release, started = threading.Event(), threading.Event()

    def block(_: Callable[[], bool]) -> None:
        started.set()
        assert release.wait(LIMIT)

    with ThreadPoolExecutor(MAX_PENDING_WORK) as callers:
        waiting = [callers.submit(compute.run, "w", Call(), block) for _ in range(MAX_PENDING_WORK)]
        assert started.wait(LIMIT)
        wait_until(lambda: compute._executor._work_queue.qsize() == MAX_PENDING_WORK - 1)
        with pytest.raises(ServiceBusy, match="calls are pending already"):
            compute.run("w", Call(), block)
        release.set()
        for call in waiting:
            call.result(timeout=LIMIT)
    assert compute.run("w", Call(), lambda _: "free again") == "free again"


def test_work_is_cancelled_if_its_caller_disconnects(compute: ComputeThread) -> None:
    call, started = Call(), threading.Event()

    def work(cancelled: Callable[[], bool]) -> str:
        started.set()
        return "stopped early" if wait_for_cancellation(cancelled) else "not cancelled"

    with ThreadPoolExecutor(1) as callers:
        pending = callers.submit(compute.run, "w", call, work)
        assert started.wait(LIMIT)
        assert not pending.done()
        call.end()
        assert pending.result(timeout=LIMIT) == "stopped early"


def test_queued_work_is_dropped_if_its_caller_disconnects(compute: ComputeThread) -> None:
    release, started, waiting, ran = threading.Event(), threading.Event(), Call(), []

    def block(_: Callable[[], bool]) -> None:
        started.set()
        assert release.wait(LIMIT)

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(compute.run, "block", Call(), block)
        assert started.wait(LIMIT)
        second = callers.submit(compute.run, "late", waiting, lambda _: ran.append(1))
        while not waiting._callbacks:
            assert not second.done()
        waiting.end()
        release.set()
        first.result(timeout=LIMIT)
        with pytest.raises(Cancelled, match="late: the caller was gone before the work started"):
            second.result(timeout=LIMIT)
    assert ran == []
    assert "late" not in compute.busy_seconds()


def test_work_of_a_disconnected_caller_never_starts(compute: ComputeThread) -> None:
    call, ran = Call(), []
    call.end()
    with pytest.raises(Cancelled):
        compute.run("w", call, lambda _: ran.append(1))
    assert ran == []


def test_a_passed_deadline_releases_the_caller_and_cancels_the_work(compute: ComputeThread) -> None:
    stopped = threading.Event()

    def work(cancelled: Callable[[], bool]) -> None:
        if wait_for_cancellation(cancelled):
            stopped.set()

    with pytest.raises(DeadlinePassed, match="w: the deadline passed"):
        compute.run("w", Call(remaining=0.05), work)
    assert stopped.wait(LIMIT)
    assert compute.run("w", Call(), lambda _: "continues") == "continues"


def test_close_drops_queued_work_and_does_not_wait() -> None:
    compute, release, started, ran = ComputeThread(), threading.Event(), threading.Event(), []

    def block(_: Callable[[], bool]) -> None:
        started.set()
        assert release.wait(LIMIT)

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(compute.run, "w", Call(), block)
        assert started.wait(LIMIT)
        second = callers.submit(compute.run, "w", Call(), lambda _: ran.append(1))
        wait_until(lambda: compute._executor._work_queue.qsize() == 1)
        compute.close()
        assert not first.done()
        with pytest.raises(CancelledError):
            second.result(timeout=LIMIT)
        release.set()
        first.result(timeout=LIMIT)
    assert ran == []


@pytest.mark.parametrize("disconnects", [True, False])
def test_abandoned_work_is_reported_with_the_seconds_since_its_deadline(
    compute: ComputeThread, disconnects: bool
) -> None:
    caller, started, end = Call(remaining=0.5), threading.Event(), threading.Event()
    start = time.monotonic()

    def work(_: Callable[[], bool]) -> None:
        started.set()
        assert end.wait(LIMIT)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compute.run, "update", caller, work)
        assert started.wait(LIMIT)
        if disconnects:
            caller.end()
        wait_until(lambda: compute.abandoned()[1] > 0.01)
        name, seconds = compute.abandoned()
        assert name == "update"
        assert seconds <= time.monotonic() - start - 0.5
        with pytest.raises(DeadlinePassed):
            waiting.result(LIMIT)
        end.set()
    wait_until(lambda: compute.abandoned() == ("", 0.0))


@pytest.mark.parametrize("remaining", [60.0, None])
def test_work_of_a_disconnected_caller_is_not_abandoned_before_its_deadline(
    compute: ComputeThread, remaining: float | None
) -> None:
    caller, started, end = Call(remaining), threading.Event(), threading.Event()

    def work(_: Callable[[], bool]) -> None:
        started.set()
        assert end.wait(LIMIT)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compute.run, "update", caller, work)
        assert started.wait(LIMIT)
        caller.end()
        time.sleep(0.02)
        assert compute.abandoned() == ("", 0.0)
        end.set()
        waiting.result(LIMIT)


def test_a_process_exits_if_work_runs_too_long_after_its_deadline(
    compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_main, "CHECK_INTERVAL", 0.01)
    role: ModelServicer[Any] = ModelServicer(None, compute, 1)
    role.role = Role.ACTOR  # type: ignore[attr-defined]
    end, endings = threading.Event(), queue.SimpleQueue[str]()
    with ThreadPoolExecutor(2) as pool:
        start = time.monotonic()
        waiting = pool.submit(compute.run, "update", Call(remaining=0.5), lambda _: end.wait(LIMIT))
        watching = pool.submit(services_main._wait_for_end, endings, [role], 0.2)
        with pytest.raises(ServiceFailed, match=r"actor: update is still running \d+ s after its deadline"):
            watching.result(LIMIT)
        assert time.monotonic() - start > 0.7
        endings.put("end")
        end.set()
        with pytest.raises(DeadlinePassed):
            waiting.result(LIMIT)


class Servicer(ModelServicer[Any]):
    """A servicer with a compute thread only."""

    role = Role.GENERATOR


def test_a_stuck_engine_gets_no_heartbeats_and_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(services_main, "CHECK_INTERVAL", 0.01)
    compute, end = ComputeThread(stall_seconds=0.05), threading.Event()

    def stuck(cancelled: Callable[[], bool], emit: Callable[[str], None]) -> str:
        assert end.wait(LIMIT)
        return "late"

    with pytest.raises(EngineFailed, match=r"generate: the engine has made no progress for 0\.05 s"):
        list(compute.stream("generate", Call(), stuck, lambda: "alive"))
    with pytest.raises(ServiceFailed, match="generator: generate: the engine has made no progress"):
        services_main._wait_for_end(queue.SimpleQueue(), [Servicer(None, compute, 1)], 60)
    end.set()
    compute.close()


def test_an_engine_that_asks_whether_it_is_cancelled_is_slow_but_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "HEARTBEAT_SECONDS", 0.005)
    compute, beats = ComputeThread(stall_seconds=0.2), list[str]()

    def slow(cancelled: Callable[[], bool], emit: Callable[[str], None]) -> str:
        # Longer than the limit in total.
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            assert not cancelled()
        return "done"

    beats = list(compute.stream("generate", Call(), slow, lambda: "alive"))
    assert beats[-1] == "done"
    assert len(beats) > 1
    assert compute.failure == ""
    compute.close()


def test_a_generation_that_waits_for_its_turn_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "HEARTBEAT_SECONDS", 0.01)
    compute, end = ComputeThread(stall_seconds=0.05), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(compute.run, "update", Call(), lambda _: end.wait(LIMIT))
        wait_until(lambda: compute.pending() == 1)
        events = compute.stream("generate", Call(), lambda cancelled, emit: "done", lambda: "alive")
        assert [next(events) for _ in range(20)] == ["alive"] * 20
        end.set()
        assert list(events)[-1] == "done"
        assert before.result(LIMIT)
    compute.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_dead_engine_ends_its_process(
    compute: ComputeThread, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_main, "CHECK_INTERVAL", 0.01)

    def die(*_: Any) -> Any:
        raise EngineFailed("engine vllm: its process died")

    with pytest.raises(EngineFailed):
        list(compute.stream("generate", Call(), die)) if streamed else compute.run("update_weights", Call(), die)
    with pytest.raises(ServiceFailed, match="generator: engine vllm: its process died; this process ends"):
        services_main._wait_for_end(queue.SimpleQueue(), [Servicer(None, compute, 1)], 60)
