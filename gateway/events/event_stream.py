"""Live updates of runs as server-sent events.

Each listener reads the history of a run from its files at a separate pace. So a slow listener misses nothing except checkpoints
that were deleted before it read them. The current progress and the health of the processes are not stored; a listener gets the
newest values when it is ready for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from quartet.gateway.events.event_cursor import EventCursor
from quartet.gateway.events.event_history import EventHistory, EventReader, encode_event
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import ProgressInfo, ServiceInfo

Result = TypeVar("Result")

log = structlog.get_logger()

POLL_SECONDS = 0.2
"""Interval between two polls of a run's files and progress. Listeners are notified at most this often."""
SERVICE_POLL_SECONDS = 2.0
"""Interval between two polls of a run's processes."""
HEARTBEAT_SECONDS = 15.0
"""Time without an event after which a comment keeps the stream alive."""
FILE_THREADS = 4
"""Threads that read files."""
POLL_THREADS = 8
"""Threads that poll processes, which may respond slowly."""
MAX_IDLE_STREAMS = 16
"""Runs without a listener whose file index is kept."""

_KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """The events of one run. It polls the run while it has listeners. For use in one event loop."""

    def __init__(
        self,
        history: EventHistory,
        progress: Callable[[], ProgressInfo],
        services: Callable[[], Sequence[ServiceInfo]],
        file_threads: ThreadPoolExecutor,
        poll_threads: ThreadPoolExecutor,
    ) -> None:
        self._history, self._progress, self._services = history, progress, services
        self._file_threads, self._poll_threads = file_threads, poll_threads
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._newest_states: dict[str, bytes] = {}
        """The newest ``progress`` and ``services`` events."""
        self._published_states: dict[str, bytes] = {}
        """The states that are sent to listeners. The files have been read since these were polled."""
        self._health: list[tuple[str, str, str, str]] = []
        self.listeners = 0

    async def listen(self, after: EventCursor | None, stopping: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield all events after a cursor, or from now on if it is None, until ``stopping`` is set."""
        self.listeners += 1
        if self.listeners == 1:
            self._start_polling(stopping)
        try:
            reader, rewind = await self._run_in(self._file_threads, lambda: self._history.start(after))
            if "progress" not in self._published_states:
                await self._poll_progress()
                self._published_states = dict(self._newest_states)
            # The first event has an id, so that a client that disconnects before the second event can resume here.
            sent = {"progress": self._published_states["progress"]}
            yield rewind + b"id: %s\n" % str(reader.cursor).encode() + sent["progress"]
            while not stopping.is_set():
                changed, states = self._changed, self._published_states
                pending = b""
                async for events in self._unread(reader):
                    if pending:
                        yield pending
                    pending = events
                new_states = {kind: event for kind, event in states.items() if sent.get(kind) != event}
                sent |= new_states
                # Send as few chunks as possible: with many listeners, their number determines the cost.
                pending += b"".join(new_states.values())
                if pending:
                    yield pending
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield _KEEP_ALIVE
            # A gateway stops together with its run: send the last steps before the stream ends.
            await self._run_in(self._file_threads, self._history.refresh)
            async for events in self._unread(reader):
                yield events
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._stop_polling()

    async def _unread(self, reader: EventReader) -> AsyncIterator[bytes]:
        """Yield the events from the files that the reader has not read."""
        while True:
            before = reader.cursor
            events = self._history.read_cached(reader)
            if events is None:
                events = await self._run_in(self._file_threads, lambda: self._history.read(reader))
            if events:
                yield events
            if reader.cursor == before:
                return

    async def _run_in(self, threads: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    def _start_polling(self, stopping: asyncio.Event) -> None:
        polls = (
            (self._poll_files, POLL_SECONDS),
            (self._poll_progress, POLL_SECONDS),
            (self._poll_services, SERVICE_POLL_SECONDS),
        )
        self._tasks = [asyncio.create_task(self._repeat(poll, interval)) for poll, interval in polls]
        self._tasks.append(asyncio.create_task(self._notify_at_stop(stopping)))

    def _stop_polling(self) -> None:
        """Stop polling and drop the states, which would be out of date for the next listener."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._newest_states, self._published_states = {}, {}
        self._health = []

    async def _repeat(self, poll: Callable[[], Awaitable[None]], interval: float) -> None:
        logged = ""
        while True:
            try:
                await poll()
                logged = ""
            except Exception as error:
                # Listeners wait for the next poll. The error is logged once.
                if str(error) != logged:
                    log.warning("polling a run failed", error=str(error), kind=type(error).__name__)
                logged = str(error)
            await asyncio.sleep(interval)

    async def _notify_at_stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._notify()

    async def _poll_files(self) -> None:
        # Taken before the files are read, so that the end of a run is published after its last step.
        newest = dict(self._newest_states)
        if await self._run_in(self._file_threads, self._history.refresh) or newest != self._published_states:
            self._published_states = newest
            self._notify()

    async def _poll_progress(self) -> None:
        progress = await self._run_in(self._poll_threads, self._progress)
        self._newest_states["progress"] = encode_event("progress", progress.model_dump(mode="json"))

    async def _poll_services(self) -> None:
        infos = await self._run_in(self._poll_threads, self._services)
        health = [(info.role, info.address, str(info.health), info.detail) for info in infos]
        if health != self._health:
            self._health = health
            services = [info.model_dump(mode="json") for info in infos]
            self._newest_states["services"] = encode_event("services", {"services": services})

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class EventStreams:
    """The event streams of all runs with listeners, and of the most recent runs without."""

    def __init__(
        self,
        catalog: RunCatalog,
        progress: Callable[[str], ProgressInfo],
        services: Callable[[str], Sequence[ServiceInfo]],
    ) -> None:
        """``progress`` returns the progress of any run, active or not."""
        self._catalog, self._progress, self._services = catalog, progress, services
        self._streams: OrderedDict[str, EventStream] = OrderedDict()
        self._file_threads = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="event-files")
        self._poll_threads = ThreadPoolExecutor(POLL_THREADS, thread_name_prefix="event-polls")

    def of(self, name: str) -> EventStream:
        """Return the stream of a run. Raises NotFound."""
        files = self._catalog.find(name)
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = EventStream(
                EventHistory(files),
                lambda: self._progress(name),
                lambda: self._services(name),
                self._file_threads,
                self._poll_threads,
            )
        self._streams.move_to_end(name)
        idle = [run for run, other in self._streams.items() if not other.listeners and other is not stream]
        for run in idle[: max(0, len(idle) - MAX_IDLE_STREAMS)]:
            del self._streams[run]
        return stream

    def close(self) -> None:
        """Stop the threads. All streams must have ended."""
        for threads in (self._file_threads, self._poll_threads):
            threads.shutdown(wait=False, cancel_futures=True)
