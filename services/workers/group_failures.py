"""Failures of a worker group, as its rank 0 learns of them: ranks that end or hang, from before the ranks meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quartet.contract.domain_errors import domain_error
from quartet.errors import ConfigError, OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.models.workers.progress import Progress
from quartet.services.workers.processes import RankProcess
from quartet.services.workers.watchdog import Failure, Watchdog

END_SECONDS = 5.0
"""Time that a rank with an error may take to publish it and to end."""
POLL_SECONDS = 0.1


class GroupFailures:
    """The failures after which only a restart of the group helps: a rank has ended, hangs, or has computed something else.

    Until the ranks have met, only the end of a child is noticed.
    """

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._progress: Progress | None = None
        self._watchdog: Watchdog | None = None
        self._failed = Failure()

    def watch(self, progress: Progress, watchdog: Watchdog) -> None:
        """Use the watchdog of the ranks, which have met, and the progress of this one."""
        self._progress, self._watchdog = progress, watchdog

    def poll(self) -> Failure:
        """Return the failure of the group. Never waits. May be called from any thread."""
        if self._failed.text:
            return self._failed
        if end := self._process.failure():
            text, kind = self._process.error
            error = Failure(text, kind)
            if not text and self._watchdog is not None:
                error = self._watchdog.error(self._process.ended)
            self._failed = Failure(f"{end}: {error.text}" if error.text else end, error.kind)
        elif self._watchdog is not None and (hung := self._watchdog.failure()):
            self._failed = Failure(hung)
        return self._failed

    def record(self, failure: Failure) -> None:
        """Set the failure of the group."""
        self._failed = failure

    def lost_rank(self) -> Failure:
        """Wait a moment, and return which rank was lost, and so has ended a collective of this one."""
        deadline = time.monotonic() + END_SECONDS
        while self._process.children and not self.poll().text and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.poll().text or self._process.children or self._watchdog is None:
            return self._failed
        return self._watchdog.lost()

    @contextmanager
    def watched_start(self, end: Callable[[Exception], None]) -> Iterator[None]:
        """Name the rank that ends while rank 0 joins the group and loads the model.

        Raises ServiceFailed, OutOfMemory, or ConfigError if that has ended the rank. ``end`` ends this process. It is called on
        another thread if this one waits for a rank that has ended.
        """
        if self._process.size == 1:
            yield
            return
        loaded = threading.Event()

        def watch() -> None:
            while not loaded.wait(POLL_SECONDS):
                # A rank that does not come, or that leaves, lets others wait: only gloo's closed connections end a collective.
                if self.poll().text:
                    if not loaded.wait(END_SECONDS):
                        end(_start_error(self._failed))
                    return

        threading.Thread(target=watch, name="watchdog of the start", daemon=True).start()
        try:
            try:
                yield
            finally:
                loaded.set()
        except BaseException as error:
            # Other domain errors are those of rank 0.
            if isinstance(error, QuartetError) and not isinstance(error, ServiceUnavailable):
                raise
            cause = self.lost_rank()
            if cause.text:
                raise _start_error(cause) from error
            raise

    @contextmanager
    def reported_error(self) -> Iterator[None]:
        """Tell rank 0 the error that ends this rank. A rank of torchrun can do so when the ranks have met."""
        try:
            yield
        except BaseException as error:
            failure = failure_of(error)
            reported = self._process.report(failure.text, failure.kind)
            if not reported and self._progress is not None and self._watchdog is not None:
                self._progress.fail(failure.text, failure.kind)
                self._watchdog.publish()
            raise


def failure_of(error: BaseException) -> Failure:
    """Return the failure of a rank that an error ends."""
    known = domain_error(error) or error
    return Failure(f"{type(known).__name__}: {known}", kind_of(known))


def kind_of(error: BaseException) -> str:
    """Return the class of an error in ``quartet.errors``, or ""."""
    return type(error).__name__ if isinstance(error, QuartetError) else ""


def error_of(failure: Failure) -> QuartetError:
    """Return the error of the calls to a group that has failed. A restart does not help against too little memory."""
    return (OutOfMemory if failure.kind == OutOfMemory.__name__ else ServiceFailed)(failure.text)


def _start_error(failure: Failure) -> QuartetError:
    """Return the error of a start that has failed. A restart does not help against a wrong config either."""
    return ConfigError(failure.text) if failure.kind == ConfigError.__name__ else error_of(failure)
