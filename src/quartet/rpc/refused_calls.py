"""Calls to a service with quotas: a refused call is sent again after the time that the service names."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from quartet.errors import Cancelled, QuotaExceeded
from quartet.rpc.pending_calls import PendingResult

Result = TypeVar("Result")


class RepeatedCall(PendingResult[Result]):
    """A call that is sent again for as long as it exceeds the quota of its run. The run waits, and nothing has failed."""

    def __init__(
        self,
        begin: Callable[[], PendingResult[Result]],
        jitter: Callable[[], float] = lambda: random.uniform(1.0, 1.5),
    ) -> None:
        """``begin`` starts the call. The time that the service names is multiplied with ``jitter``."""
        self._begin, self._jitter = begin, jitter
        self._ended: Future[Result] = Future()
        self._lock = threading.Lock()
        self._call: PendingResult[Result] | None = None
        self._timer: threading.Timer | None = None
        self._cancelled = False
        self._start()

    def done(self) -> bool:
        """See ``PendingResult.done``."""
        return self._ended.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """See ``PendingResult.when_done``."""
        self._ended.add_done_callback(lambda _: callback())

    def result(self) -> Result:
        """See ``PendingResult.result``."""
        return self._ended.result()

    def cancel(self) -> None:
        """See ``PendingResult.cancel``. Also ends the wait for another attempt."""
        with self._lock:
            self._cancelled = True
            call, timer, self._timer = self._call, self._timer, None
        if timer is not None:
            timer.cancel()
            self._ended.set_exception(Cancelled("the call was cancelled while it waited for its quota"))
        elif call is not None:
            call.cancel()

    def _start(self) -> None:
        try:
            call = self._begin()
        except Exception as error:
            self._ended.set_exception(error)
            return
        with self._lock:
            self._call = call
            cancelled = self._cancelled
        if cancelled:
            call.cancel()
        call.when_done(lambda: self._handle(call))

    def _handle(self, call: PendingResult[Result]) -> None:
        try:
            self._ended.set_result(call.result())
        except QuotaExceeded as error:
            with self._lock:
                if not self._cancelled:
                    self._timer = threading.Timer(error.retry_seconds * self._jitter(), self._repeat)
                    self._timer.daemon = True
                    self._timer.start()
                    return
            self._ended.set_exception(Cancelled("the call was cancelled while it waited for its quota"))
        except Exception as error:
            self._ended.set_exception(error)

    def _repeat(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            self._timer = None
        self._start()
