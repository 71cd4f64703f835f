"""The compute thread runs model work, one call at a time. Other threads respond to health and status checks."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from quartet.errors import Cancelled, DeadlinePassed, EngineFailed, ServiceBusy
from quartet.rpc.limits import MAX_CALL_SECONDS, MAX_PENDING_WORK

Result = TypeVar("Result")
Event = TypeVar("Event")

HEARTBEAT_SECONDS = 5.0
"""Longest silence of a stream with heartbeats."""


class Caller(Protocol):
    """The part of a gRPC context that the compute thread needs."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None without a deadline."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Register a callback for the end of the call. Return False if it has ended."""


class CallerState:
    """State of the caller of one call: whether it still waits for the response."""

    def __init__(self, remaining: float) -> None:
        """``remaining``: seconds until the caller's deadline."""
        self._deadline = time.monotonic() + remaining
        self._gone_since: float | None = None
        self._last_sign: float | None = None

    def poll(self) -> bool:
        """Return whether the caller no longer waits, and take the question as a sign that the work makes progress."""
        self._last_sign = time.monotonic()
        return self.is_gone()

    def silent_seconds(self) -> float:
        """Return the time since the last sign of progress; 0 before the work starts."""
        return 0.0 if self._last_sign is None else time.monotonic() - self._last_sign

    def mark_gone(self) -> None:
        """Record that the caller has cancelled, disconnected or reached its deadline."""
        if self._gone_since is None:
            self._gone_since = time.monotonic()

    def is_gone(self) -> bool:
        """Return whether the caller no longer waits."""
        return self._gone_since is not None

    def overdue_seconds(self) -> float:
        """Return the seconds since the caller is gone and its deadline has passed too; 0 before."""
        since = self._gone_since
        return 0.0 if since is None else max(0.0, time.monotonic() - max(since, self._deadline))


class ComputeThread:
    """Thread that runs work in order, so that a model never computes two calls at once."""

    def __init__(
        self,
        initializer: Callable[[], object] | None = None,
        stall_seconds: float = MAX_CALL_SECONDS,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """``initializer`` is called in the thread before its first work, ``on_idle`` after work if no other call is pending.

        Work of ``stream`` that does not ask whether it is cancelled for ``stall_seconds`` counts as stuck.
        """
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute", initializer=initializer)
        self._stall_seconds, self._on_idle = stall_seconds, on_idle
        self.failure = ""
        """Error that only a restart of this process can repair: the engine of a generation has died, or is stuck."""
        self.around: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Function that returns the context in which the thread does each work, by its kind."""
        self.at_poll: Callable[[], object] = lambda: None
        """Function that the thread calls each time that work asks whether it is cancelled."""
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._running: tuple[str, CallerState] | None = None
        self._started = 0.0
        self._slots = threading.BoundedSemaphore(MAX_PENDING_WORK)
        self._pending = 0

    def run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Run ``work(cancelled)`` and wait for its result.

        Work that has not started when the caller is gone is dropped. Running work may poll ``cancelled()``. Raises DeadlinePassed
        if the caller's deadline passes first, Cancelled if the caller is gone, ServiceBusy if too many calls are pending.
        """
        with self._slot(kind):
            future, state = self._submit(kind, caller, work)
            try:
                return future.result(timeout=remaining_time(caller))
            except FutureTimeoutError:
                state.mark_gone()
                raise DeadlinePassed(f"{kind}: the deadline passed") from None

    def stream(
        self,
        kind: str,
        caller: Caller,
        work: Callable[[Callable[[], bool], Callable[[Event], None]], Event],
        heartbeat: Callable[[], Event] | None = None,
    ) -> Iterator[Event]:
        """Run ``work(cancelled, emit)``. Yield each emitted event at once, and the result last. Raises as ``run``.

        With ``heartbeat``, also yield its result after every ``HEARTBEAT_SECONDS`` without an event. Raises EngineFailed
        instead if the work is stuck.
        """
        with self._slot(kind):
            events: queue.SimpleQueue[Event | Future[Event]] = queue.SimpleQueue()
            future, state = self._submit(kind, caller, lambda cancelled: work(cancelled, events.put))
            future.add_done_callback(events.put)
            while True:
                remaining = remaining_time(caller)
                try:
                    event = events.get(timeout=min(remaining, HEARTBEAT_SECONDS) if heartbeat else remaining)
                except queue.Empty:
                    if heartbeat and remaining > HEARTBEAT_SECONDS:
                        if state.silent_seconds() > self._stall_seconds:
                            state.mark_gone()
                            self.failure = f"{kind}: the engine has made no progress for {self._stall_seconds:g} s"
                            raise EngineFailed(self.failure) from None
                        yield heartbeat()
                        continue
                    state.mark_gone()
                    raise DeadlinePassed(f"{kind}: the deadline passed") from None
                if isinstance(event, Future):
                    yield event.result()
                    return
                yield event

    @contextmanager
    def _slot(self, kind: str) -> Iterator[None]:
        if not self._slots.acquire(blocking=False):
            raise ServiceBusy(f"{kind}: {MAX_PENDING_WORK} calls are pending already; send fewer at once")
        try:
            yield
        finally:
            self._slots.release()

    def _submit(
        self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]
    ) -> tuple[Future[Result], CallerState]:
        state = CallerState(remaining_time(caller))
        if not caller.add_callback(state.mark_gone):
            raise Cancelled(f"{kind}: the caller is gone")

        def counted() -> Result:
            try:
                return timed()
            finally:
                with self._lock:
                    self._pending -= 1

        def timed() -> Result:
            if state.is_gone():
                raise Cancelled(f"{kind}: the caller was gone before the work started")
            start = time.perf_counter()
            self._running, self._started = (kind, state), start

            def poll() -> bool:
                self.at_poll()
                return state.poll()

            try:
                state.poll()
                with self.around(kind):
                    return work(poll)
            except EngineFailed as error:
                self.failure = str(error)
                raise
            finally:
                # Before the caller has the result, so that the next phase finds the memory free.
                if self.pending() == 1:
                    self._on_idle()
                with self._lock:
                    self._running = None
                    self._busy[kind] += time.perf_counter() - start

        with self._lock:
            self._pending += 1
        return self._executor.submit(counted), state

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds of work until now, by kind."""
        with self._lock:
            seconds = dict(self._busy)
            if (running := self._running) is not None:
                seconds[running[0]] = seconds.get(running[0], 0.0) + time.perf_counter() - self._started
            return seconds

    def pending(self) -> int:
        """Return the number of calls whose work waits or runs, also those whose caller is gone."""
        with self._lock:
            return self._pending

    def abandoned(self) -> tuple[str, float]:
        """Return the kind of running work whose caller is gone and whose deadline has passed, and for how many seconds.

        Returns ("", 0) without abandoned work. A caller may be gone before the deadline because another service failed. Until the
        deadline, the work does not count as abandoned.
        """
        running = self._running
        overdue = 0.0 if running is None else running[1].overdue_seconds()
        return (running[0], overdue) if running is not None and overdue else ("", 0.0)

    def close(self) -> None:
        """Drop work that has not started. Running work has had its time while the server drained; it ends with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def remaining_time(caller: Caller) -> float:
    """Return the seconds until the caller's deadline, at most MAX_CALL_SECONDS."""
    remaining = caller.time_remaining()
    return MAX_CALL_SECONDS if remaining is None else min(remaining, MAX_CALL_SECONDS)
