"""The compute thread: model work runs one piece at a time, beside the threads that answer health and status."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol, TypeVar

from quartet.errors import Cancelled, DeadlinePassed, ServiceBusy
from quartet.rpc.limits import MAX_CALL, MAX_PENDING_WORK

Result = TypeVar("Result")


class Caller(Protocol):
    """What the compute thread needs of a gRPC context: how long the caller waits, and when it went away."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call ends; False when it already has."""


class Gone:
    """Whether a caller went away, and since when."""

    def __init__(self, remaining: float) -> None:
        """``remaining``: seconds for which the caller meant to wait."""
        self._deadline = time.monotonic() + remaining
        self.since: float | None = None

    def set(self) -> None:
        """Notes that it did."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Whether it did."""
        return self.since is not None

    def overdue(self) -> float:
        """Seconds since the caller is gone and would not have waited any longer either; 0 before."""
        return 0.0 if self.since is None else max(0.0, time.monotonic() - max(self.since, self._deadline))


class ComputeThread:
    """Runs work in order on one thread, so that one model never computes two things at once."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._in_hand: tuple[str, Gone] | None = None
        self._places = threading.BoundedSemaphore(MAX_PENDING_WORK)
        self._pending = 0

    def run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Runs ``work(cancelled)`` and waits for it.

        Work that has not begun when the caller goes away is dropped; work that has begun may ask ``cancelled()``.
        Raises DeadlinePassed when the caller's deadline passes first, Cancelled when the caller goes away, ServiceBusy when
        too many callers wait already.
        """
        if not self._places.acquire(blocking=False):
            raise ServiceBusy(f"{kind}: {MAX_PENDING_WORK} calls wait already; send fewer at once")
        self._count(1)
        try:
            return self._run(kind, caller, work)
        finally:
            self._count(-1)
            self._places.release()

    def _count(self, change: int) -> None:
        with self._lock:
            self._pending += change

    def _run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        gone = Gone(remaining_time(caller))
        if not caller.add_callback(gone.set):
            raise Cancelled(f"{kind}: the caller went away")

        def timed() -> Result:
            if gone.is_set():
                raise Cancelled(f"{kind}: the caller went away before the work began")
            start = time.perf_counter()
            self._in_hand = (kind, gone)
            try:
                return work(gone.is_set)
            finally:
                self._in_hand = None
                with self._lock:
                    self._busy[kind] += time.perf_counter() - start

        future = self._executor.submit(timed)
        try:
            return future.result(timeout=remaining_time(caller))
        except FutureTimeoutError:
            gone.set()
            raise DeadlinePassed(f"{kind}: the deadline passed") from None

    def busy_seconds(self) -> dict[str, float]:
        """Seconds spent on finished work, by kind."""
        with self._lock:
            return dict(self._busy)

    def pending(self) -> int:
        """Calls that wait, the one that is worked on included."""
        with self._lock:
            return self._pending

    def abandoned(self) -> tuple[str, float]:
        """What is being worked on although its caller is gone and its deadline has passed, and since how many seconds; or "", 0.

        Until its deadline, work may take as long as its caller thought it could: that a caller goes away earlier, because another
        service failed, says nothing about the work.
        """
        pending_step = self._in_hand
        overdue = 0.0 if pending_step is None else pending_step[1].overdue()
        return (pending_step[0], overdue) if pending_step is not None and overdue else ("", 0.0)

    def close(self) -> None:
        """Drops what has not begun. What has begun had its time while the server drained, and ends with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def remaining_time(caller: Caller) -> float:
    """Seconds until the caller's deadline; one that sets no deadline has one all the same."""
    remaining = caller.time_remaining()
    return MAX_CALL if remaining is None else min(remaining, MAX_CALL)
