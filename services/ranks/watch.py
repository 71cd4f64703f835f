"""What watches a worker group: it finds the rank that ends, hangs or is lost. See docs/adr/0039-hung-ranks-and-nodes.md."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from quartet.contract.domain_errors import domain_error
from quartet.errors import ConfigError, OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.models.workers.progress import Progress, RankReport
from quartet.services.ranks.processes import RankProcess
from quartet.system.child_processes import process_state

END_SECONDS = 5.0
"""Time that a rank with an error may take to publish it and to end."""
POLL_SECONDS = 0.1

BEAT_SECONDS = 0.5
"""Seconds between two reports of a rank."""
LOST_SECONDS = 2.0
"""Seconds without a report after which a rank counts as lost, once a connection to a rank has been closed."""

PUBLISH_SECONDS = 4.0
"""Time limit to publish the error that ends a rank."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of the end of a group or a rank, or "". ``kind``: class of the error in ``quartet.errors``, if known."""

    text: str = ""
    kind: str = ""


class Exchange(Protocol):
    """The exchange of reports between ranks."""

    def exchange(self, report: RankReport, ranks: Sequence[int]) -> list[tuple[int, RankReport]]:
        """Publish this rank's report. Return the number and the report of each of ``ranks``. May wait."""


class Silence:
    """Time for which a value has not changed. A pause between two polls counts for at most ``MAX_PAUSE``.

    After a longer one this process itself was suspended, and the silence says nothing about the others.
    """

    MAX_PAUSE = 5.0

    def __init__(self) -> None:
        self._value: object = None
        self._polled = 0.0
        self.seconds = 0.0

    def poll(self, value: object, now: float) -> float:
        """Return the seconds since ``value`` changed."""
        paused, self._polled = now - self._polled, now
        changed, self._value = value != self._value, value
        self.seconds = 0.0 if changed else self.seconds + min(paused, self.MAX_PAUSE)
        return self.seconds


class HangDetector:
    """Detector of a rank that hangs, from the reports of all ranks over time."""

    def __init__(self, size: int, hang_timeout: float) -> None:
        self._size, self._timeout = size, hang_timeout
        self._beats = [Silence() for _ in range(size)]
        self._marks = [Silence() for _ in range(size)]
        self._reports: list[RankReport] = []

    def poll(self, reports: Sequence[tuple[int, RankReport]], now: float) -> str:
        """Return which rank hangs, or "". ``reports``: number and report of every rank, in order."""
        self._reports = [report for _, report in reports]
        for rank, (beat, report) in enumerate(reports):
            self._beats[rank].poll(beat, now)
            self._marks[rank].poll((report.commands, report.marks, report.command), now)
        stopped = [rank for rank in range(self._size) if self._beats[rank].seconds > self._timeout]
        return self._describe(stopped or self._behind())

    def error(self, rank: int) -> Failure:
        """Return the error that ``rank`` has reported."""
        return Failure(self._reports[rank].error, self._reports[rank].error_kind) if self._reports else Failure()

    def lost(self) -> Failure:
        """Return the other ranks that no longer report, and their errors.

        If some have reported an error of a known class, only those count. Otherwise ranks without an error count first: those
        with one have probably lost their connection to them.
        """
        lost = [rank for rank in range(1, len(self._reports)) if self._beats[rank].seconds > LOST_SECONDS]
        known = [rank for rank in lost if self._reports[rank].error_kind]
        lost = known or [rank for rank in lost if not self._reports[rank].error] or lost
        errors = [f"{self._name(rank)}: {self._reports[rank].error or 'no sign of life'}" for rank in lost]
        kinds = (self._reports[rank].error_kind for rank in lost)
        return Failure("; ".join(errors), next(filter(None, kinds), ""))

    def _behind(self) -> list[int]:
        """Return the ranks for which the others wait, for longer than the limit."""
        reports, ranks = self._reports, range(self._size)
        if not reports[0].command or any(report.reading for report in reports):
            return []
        silent = [rank for rank in ranks if self._marks[rank].seconds > self._timeout]
        waiting = [rank for rank in silent if reports[rank].collective]
        computing = [rank for rank in silent if not reports[rank].collective and reports[rank].command]
        if waiting and computing:
            return computing
        places = [(reports[rank].commands, reports[rank].marks) for rank in ranks]
        if len(silent) < self._size or (not waiting and min(places) == max(places)):
            return []
        return [rank for rank in ranks if places[rank] == min(places)]

    def _describe(self, hung: list[int]) -> str:
        if not hung:
            return ""
        states = []
        for rank in hung:
            report = self._reports[rank]
            place = ", ".join(filter(None, (report.command or "no command", report.place)))
            within = f", in {report.collective}" if report.collective else ""
            stopped = process_state(report.process) if report.host == socket.gethostname() else ""
            error = f": {report.error}" if report.error else ""
            states.append(f"{self._name(rank)}: no progress for {self._timeout:g} s in {place}{within}{stopped}{error}")
        others = sorted({self._reports[rank].collective for rank in range(self._size) if rank not in hung} - {""})
        waits = f", while the others wait in {' and '.join(others)}" if others else ""
        return "; ".join(states) + waits

    def _name(self, rank: int) -> str:
        report = self._reports[rank]
        host = "" if report.host == socket.gethostname() else f" on {report.host}"
        return f"rank {rank} of {self._size} (process {report.process}{host})"


class Watchdog:
    """Exchange of reports by a thread. Rank 0 watches all ranks, the others watch rank 0."""

    def __init__(
        self, exchange: Exchange, rank: int, size: int, report: Callable[[], RankReport], hang_timeout: float
    ) -> None:
        """Start. ``report`` returns this rank's report."""
        self._exchange, self._rank, self._size, self._report = exchange, rank, size, report
        self._timeout = hang_timeout
        self._detector = HangDetector(size, hang_timeout)
        self._exchanged = 0
        self._beat = -1
        self._has_exchanged = threading.Condition()
        self._stopped = threading.Event()
        self._failure = ""
        self._watching = threading.Thread(target=self._end_without_rank_0, name="watchdog of rank 0", daemon=True)
        threading.Thread(target=self._exchange_until_stopped, name="rank reports", daemon=True).start()
        if rank:
            self._watching.start()

    def failure(self) -> str:
        """Return which rank hangs, in rank 0, or "". Never waits."""
        return self._failure

    def error(self, rank: int) -> Failure:
        """Return the error that ``rank`` has reported, in rank 0. Never waits."""
        return self._detector.error(rank)

    def lost(self) -> Failure:
        """Wait a moment, and return which rank is lost, in rank 0."""
        time.sleep(LOST_SECONDS + 3 * BEAT_SECONDS)
        return self._detector.lost()

    def publish(self) -> None:
        """Wait until rank 0 has this rank's newest report, for at most a few seconds."""
        deadline = time.monotonic() + PUBLISH_SECONDS

        def wait_for(is_reached: Callable[[], bool]) -> None:
            self._has_exchanged.wait_for(is_reached, deadline - time.monotonic())

        with self._has_exchanged:
            # An exchange that runs may have the report before, and rank 0 may have read the reports of its newest exchange.
            exchanged = self._exchanged + 2
            wait_for(lambda: self._exchanged >= exchanged)
            beat = self._beat + 2
            wait_for(lambda: self._beat >= beat)

    def stop(self) -> None:
        """Stop watching. Afterwards the watchdog does not end this process."""
        self._stopped.set()
        if self._rank:
            self._watching.join()

    def _exchange_until_stopped(self) -> None:
        ranks = [0] if self._rank else list(range(self._size))
        while not self._stopped.is_set():
            try:
                reports = self._exchange.exchange(self._report(), ranks)
            except RuntimeError:
                # A store that does not respond leaves rank 0 silent. Rank 0 itself is told by its connections to the others.
                self._stopped.wait(BEAT_SECONDS)
                continue
            with self._has_exchanged:
                self._exchanged += 1
                self._beat = reports[0][0]
                self._has_exchanged.notify_all()
            if not self._rank:
                self._failure = self._failure or self._detector.poll(reports, time.monotonic())
            self._stopped.wait(BEAT_SECONDS)

    def _end_without_rank_0(self) -> None:
        """End this process if rank 0, or the store, is silent for longer than the limit."""
        silence = Silence()
        while not self._stopped.is_set():
            if silence.poll(self._beat, time.monotonic()) > self._timeout:
                error = f"rank 0 of {self._size}: no sign of life for {self._timeout:g} s"
                log.error("process failed", error=error)
                os._exit(1)
            self._stopped.wait(BEAT_SECONDS)


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
