"""The compute thread: one piece of work at a time, and none for a caller who is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet.errors import Cancelled, DeadlinePassed, InvalidRequest
from quartet.rpc.compute import ComputeThread


class Call:
    """A caller, as gRPC's context shows it."""

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


def told(cancelled: Callable[[], bool]) -> bool:
    """Works on until told to stop, but not for ever."""
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


def test_work_gives_its_result_and_raises_its_error(compute: ComputeThread) -> None:
    assert compute.run("a", Call(), lambda _: 7) == 7

    def fail(_: Callable[[], bool]) -> None:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest, match="wrong"):
        compute.run("b", Call(), fail)
    busy = compute.busy_seconds()
    assert set(busy) == {"a", "b"}
    assert min(busy.values()) > 0


def test_work_runs_one_piece_at_a_time_in_order_on_one_thread(compute: ComputeThread) -> None:
    running, most, order, threads = 0, 0, [], set()

    def work(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(number)
        threads.add(threading.current_thread().name)
        running -= 1

    with ThreadPoolExecutor(8) as callers:
        for call in [callers.submit(compute.run, "w", Call(), lambda _, n=n: work(n)) for n in range(50)]:
            call.result(timeout=10)
    assert most == 1
    assert sorted(order) == list(range(50))
    assert len(threads) == 1


def test_work_learns_that_its_caller_went_away(compute: ComputeThread) -> None:
    call, begun = Call(), threading.Event()

    def work(cancelled: Callable[[], bool]) -> str:
        begun.set()
        return "stopped early" if told(cancelled) else "never told"

    with ThreadPoolExecutor(1) as callers:
        answer = callers.submit(compute.run, "w", call, work)
        assert begun.wait(10)
        assert not answer.done()
        call.end()
        assert answer.result(timeout=10) == "stopped early"


def test_work_whose_caller_goes_away_before_it_begins_is_dropped(compute: ComputeThread) -> None:
    release, begun, waiting, ran = threading.Event(), threading.Event(), Call(), []

    def block(_: Callable[[], bool]) -> None:
        begun.set()
        assert release.wait(10)

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(compute.run, "block", Call(), block)
        assert begun.wait(10)
        second = callers.submit(compute.run, "late", waiting, lambda _: ran.append(1))
        while not waiting._callbacks:
            assert not second.done()
        waiting.end()
        release.set()
        first.result(timeout=10)
        with pytest.raises(Cancelled, match="late: the caller went away before the work began"):
            second.result(timeout=10)
    assert ran == []
    assert "late" not in compute.busy_seconds()


def test_a_caller_who_is_gone_already_is_not_served(compute: ComputeThread) -> None:
    call, ran = Call(), []
    call.end()
    with pytest.raises(Cancelled):
        compute.run("w", call, lambda _: ran.append(1))
    assert ran == []


def test_a_deadline_that_passes_frees_the_caller_and_tells_the_work(compute: ComputeThread) -> None:
    stopped = threading.Event()

    def work(cancelled: Callable[[], bool]) -> None:
        if told(cancelled):
            stopped.set()

    with pytest.raises(DeadlinePassed, match="w: the deadline passed"):
        compute.run("w", Call(remaining=0.05), work)
    assert stopped.wait(10)
    assert compute.run("w", Call(), lambda _: "goes on") == "goes on"


def test_a_close_waits_for_the_work_in_hand() -> None:
    compute, release, begun, ended = ComputeThread(), threading.Event(), threading.Event(), []

    def work(_: Callable[[], bool]) -> None:
        begun.set()
        assert release.wait(10)
        ended.append(1)

    with ThreadPoolExecutor(2) as callers:
        answer = callers.submit(compute.run, "w", Call(), work)
        assert begun.wait(10)
        closing = callers.submit(compute.close)
        assert not closing.done()
        release.set()
        closing.result(timeout=10)
        assert ended == [1]
        answer.result(timeout=10)
