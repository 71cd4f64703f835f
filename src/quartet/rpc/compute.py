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
from quartet.rpc.limits import MAX_PENDING_WORK

Result = TypeVar("Result")


class Caller(Protocol):
    """What the compute thread needs of a gRPC context: how long the caller waits, and when it went away."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call ends; False when it already has."""


class Gone:
    """Whether a caller went away, and since when."""

    def __init__(self) -> None:
        self.since: float | None = None

    def set(self) -> None:
        """Notes that it did."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Whether it did."""
        return self.since is not None


class ComputeThread:
    """Runs work in order on one thread, so that one model never computes two things at once."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._in_hand: tuple[str, Gone] | None = None
        self._places = threading.BoundedSemaphore(MAX_PENDING_WORK)

    def run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Runs ``work(cancelled)`` and waits for it.

        Work that has not begun when the caller goes away is dropped; work that has begun may ask ``cancelled()``.
        Raises DeadlinePassed when the caller's deadline passes first, Cancelled when the caller goes away, ServiceBusy when
        too many callers wait already.
        """
        if not self._places.acquire(blocking=False):
            raise ServiceBusy(f"{kind}: {MAX_PENDING_WORK} calls wait already; send fewer at once")
        try:
            return self._run(kind, caller, work)
        finally:
            self._places.release()

    def _run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        gone = Gone()
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
            return future.result(timeout=caller.time_remaining())
        except FutureTimeoutError:
            gone.set()
            raise DeadlinePassed(f"{kind}: the deadline passed") from None

    def busy_seconds(self) -> dict[str, float]:
        """Seconds spent on finished work, by kind."""
        with self._lock:
            return dict(self._busy)

    def abandoned(self) -> tuple[str, float]:
        """What is being worked on although its caller went away, and for how many seconds that has gone on; "" and 0 for nothing.

        Work ends soon after that or will, as it seems, never end.
        """
        in_hand = self._in_hand
        if in_hand is None or in_hand[1].since is None:
            return "", 0.0
        return in_hand[0], time.monotonic() - in_hand[1].since

    def close(self) -> None:
        """Drops what has not begun. What has begun had its time while the server drained, and ends with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)
