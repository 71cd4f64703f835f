"""Turns that users wait for, and the periods by which they are attested."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from quartet.buffer.traffic import new_period
from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.errors import QuartetError

IDLE_SECONDS, MAX_SERVING_SECONDS = 0.5, 60.0
"""Time without a request after which a serving ends, and time after which it takes no more."""
ATTEST_SECONDS = 1.0
"""Time after which a serving reads the weights back, as soon as a turn is complete."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A turn that a session waits for."""

    request: GenerationRequest
    future: asyncio.Future[Answered]


@dataclass(slots=True, eq=False)
class Period:
    """The time between two looks at the weights of an engine. A turn belongs to the period in which it was completed.

    ``sessions``: those that have recorded such a turn and do not know the outcome. ``is_attested``: whether the weights were
    those of their digest; None before the end.
    """

    name: str = field(default_factory=new_period)
    sessions: set[str] = field(default_factory=set)
    is_attested: bool | None = None


Answered = tuple[Trajectory, Period]
"""A turn and its period."""


class TrafficTurns:
    """Turns that users wait for, as a source for an engine. See ``TurnSource``. Thread-safe."""

    def __init__(self) -> None:
        self.period = Period()
        """The present period, for the thread of the engine."""
        self._queue: queue.SimpleQueue[GenerationRequest] = queue.SimpleQueue()
        self._waiting: dict[TrajectoryId, _Waiting] = {}
        self._lock = threading.Lock()
        self._closed: QuartetError | None = None
        self._first: GenerationRequest | None = None
        self._stops: Callable[[], bool] = lambda: False
        self._idle_since = 0.0

    def put(self, request: GenerationRequest) -> asyncio.Future[Answered]:
        """Ask for a turn of a session. Call it on the event loop of the result."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._waiting[request.id] = _Waiting(request, future)
            self._queue.put(request)
        return future

    def wait(self, seconds: float) -> bool:
        """Wait for a turn that no engine generates yet. Return whether there is one. For the thread that starts engines."""
        if self._first is None:
            with suppress(queue.Empty):
                self._first = self._queue.get(timeout=seconds)
        return self._first is not None

    def begin(self, stops: Callable[[], bool]) -> None:
        """Begin to serve, until no turn has come for a while, or until ``stops``. Turns that have begun are finished."""
        self._stops, self._idle_since = stops, time.monotonic()

    @property
    def open(self) -> bool:
        if self._stops():
            return False
        return self._first is not None or not self._queue.empty() or time.monotonic() < self._idle_since + IDLE_SECONDS

    def take(self, wait: bool) -> list[GenerationRequest]:
        if self._stops():
            return []
        requests = [] if self._first is None else [self._first]
        self._first = None
        with suppress(queue.Empty):
            if wait and not requests:
                requests.append(self._queue.get(timeout=IDLE_SECONDS / 5))
            while True:
                requests.append(self._queue.get_nowait())
        if requests:
            self._idle_since = time.monotonic()
        return requests

    def request_of(self, id: TrajectoryId) -> GenerationRequest:
        return self._waiting[id].request

    def finish(self, turn: Trajectory) -> None:
        """Give a turn to its session."""
        self._idle_since = time.monotonic()
        waiting = self._waiting.pop(turn.id)
        waiting.future.get_loop().call_soon_threadsafe(_set_result, waiting.future, (turn, self.period))

    def end_period(self, attested: bool) -> Period:
        """End the present period, and return it."""
        ended, self.period = self.period, Period()
        ended.is_attested = attested
        return ended

    def close(self, error: QuartetError) -> None:
        """Give an error to all sessions that wait for a turn, and to those that ask for one from now on."""
        self._closed = error
        self.fail(error)

    def fail(self, error: QuartetError) -> None:
        """Give an error to all sessions that wait for a turn."""
        with self._lock:
            self._first = None
            with suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            failed, self._waiting = [*self._waiting.values()], {}
        for each in failed:
            each.future.get_loop().call_soon_threadsafe(_set_error, each.future, error)


def _set_result(future: asyncio.Future[Answered], answered: Answered) -> None:
    if not future.done():
        future.set_result(answered)


def _set_error(future: asyncio.Future[Answered], error: QuartetError) -> None:
    if not future.done():
        future.set_exception(error)
