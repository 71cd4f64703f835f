"""All sinks on one thread of their own: the run hands its figures over and goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from quartet.telemetry.sinks.sink import Sink
from quartet.types import Alert

log = structlog.get_logger()

WAITING = 1024
"""Messages that may wait for slow sinks; more are dropped."""
CLOSING = 10.0
"""Seconds that the end of a run waits for the sinks."""

_Message = Callable[[Sink], None]


class Sinks:
    """Tells all sinks the same. A sink that fails is noted once and not told anything more."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Sink]],
        note: Callable[[str], None],
        waiting: int = WAITING,
    ) -> None:
        """``openers`` connect to the sinks, by their public names, on the sinks' thread.

        ``note`` hears what a user should know; ``waiting`` messages may wait.
        """
        self._openers, self._note = dict(openers), note
        self._messages: queue.Queue[_Message | None] = queue.Queue(waiting)
        self._overran = self._closed = False
        self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
        if self._openers:
            self._thread.start()

    def continues_from(self, step: int) -> None:
        """The run goes on after ``step``."""
        self._tell(lambda sink: sink.continues_from(step))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was committed."""
        self._tell(lambda sink: sink.step(step, metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """The policy after ``step`` was evaluated."""
        self._tell(lambda sink: sink.evaluation(step, summary))

    def alert(self, alert: Alert) -> None:
        """A guard found something."""
        self._tell(lambda sink: sink.alert(alert))

    def close(self, seconds: float = CLOSING) -> None:
        """Lets the sinks take in what waits for them, for at most so many seconds. May be called again."""
        if self._closed or not self._openers:
            return
        self._closed = True
        deadline = time.monotonic() + seconds
        try:
            self._messages.put(None, timeout=seconds)
        except queue.Full:
            self._drop_what_waits()
            self._messages.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._say(
                f"{', '.join(self._openers)}: not done after {seconds:g} s; the last figures may be missing there"
            )

    def _tell(self, message: _Message) -> None:
        if self._closed or not self._openers:
            return
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            if not self._overran:
                self._overran = True
                self._say(f"{', '.join(self._openers)}: slower than the run; some figures are missing there")

    def _drop_what_waits(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()

    def _work(self) -> None:
        sinks: dict[str, Sink] = {}
        for name, opener in self._openers.items():
            try:
                sinks[name] = opener()
            except Exception as error:
                self._give_up(name, error)
        while (message := self._messages.get()) is not None:
            for name in list(sinks):
                try:
                    message(sinks[name])
                except Exception as error:
                    del sinks[name]
                    self._give_up(name, error)
        for name, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        self._say(f"{name}: {type(error).__name__}: {error}; the run goes on and sends it nothing more")

    def _say(self, text: str) -> None:
        log.warning("sinks", problem=text)
        self._note(text)
