"""Send metrics to all sinks from one background thread, so that the run never waits for a sink."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import Sink

log = structlog.get_logger()

MAX_QUEUED = 1024
"""Maximum number of messages that wait for slow sinks. Further ones are dropped."""
CLOSE_TIMEOUT = 10.0
"""Seconds that the end of a run waits for the sinks."""

_Message = Callable[[Sink], None]


class Sinks:
    """Dispatcher of every message to every sink. A sink that fails is reported once and then dropped."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Sink]],
        note: Callable[[str], None],
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """``openers`` connect to the sinks, by public name, on the background thread.

        ``note`` gets messages for the user. At most ``max_queued`` messages wait.
        """
        self._openers, self._note = dict(openers), note
        self._messages: queue.Queue[_Message | None] = queue.Queue(max_queued)
        self._overflowed = self._closed = False
        self._thread = threading.Thread(target=self._send_until_closed, name="sinks", daemon=True)
        if self._openers:
            self._thread.start()

    def continues_from(self, step: int) -> None:
        """Report that the run continues from ``step``."""
        self._send(lambda sink: sink.continues_from(step))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of a committed step."""
        self._send(lambda sink: sink.step(step, metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Report an evaluation of the policy after ``step``."""
        self._send(lambda sink: sink.evaluation(step, summary))

    def alert(self, alert: Alert) -> None:
        """Report an alert of a guard."""
        self._send(lambda sink: sink.alert(alert))

    def close(self, seconds: float = CLOSE_TIMEOUT) -> None:
        """Wait at most ``seconds`` until the sinks have taken all messages. Can be called more than once."""
        if self._closed or not self._openers:
            return
        self._closed = True
        deadline = time.monotonic() + seconds
        try:
            self._messages.put(None, timeout=seconds)
        except queue.Full:
            self._drop_queued()
            self._messages.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._report(
                f"{', '.join(self._openers)}: not finished after {seconds:g} s; the last metrics may be missing there"
            )

    def _send(self, message: _Message) -> None:
        if self._closed or not self._openers:
            return
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            if not self._overflowed:
                self._overflowed = True
                self._report(f"{', '.join(self._openers)}: slower than the run; some metrics are missing there")

    def _drop_queued(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()

    def _send_until_closed(self) -> None:
        sinks: dict[str, Sink] = {}
        for name, opener in self._openers.items():
            try:
                sinks[name] = opener()
            except Exception as error:
                self._report_dropped(name, error)
        while (message := self._messages.get()) is not None:
            for name in list(sinks):
                try:
                    message(sinks[name])
                except Exception as error:
                    del sinks[name]
                    self._report_dropped(name, error)
        for name, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._report_dropped(name, error)

    def _report_dropped(self, name: str, error: Exception) -> None:
        self._report(f"{name}: {type(error).__name__}: {error}; the run continues and sends it nothing more")

    def _report(self, text: str) -> None:
        log.warning("sink problem", problem=text)
        self._note(text)
