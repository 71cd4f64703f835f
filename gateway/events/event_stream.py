"""The live news of runs, as server-sent events.

What a run has on the disk is told from there, to each listener from its own place: a slow one hears it later and misses nothing
but checkpoints that were dropped meanwhile.
What nobody writes down, the progress of the step in hand and the health of the processes, is told as it is when a listener has
time for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from quartet.gateway.events.history import History, Reader, to_bytes
from quartet.gateway.events.jsonl_tail import Place
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Progress, ServiceInfo

Result = TypeVar("Result")

log = structlog.get_logger()

TICK = 0.2
"""Seconds between two looks at a run: no listener is woken more often."""
LOOK = 2.0
"""Seconds between two looks at its processes."""
HEARTBEAT = 15.0
"""Seconds without an event after which a comment shows that the stream is alive."""
READERS = 4
"""Threads that read files."""
ASKERS = 8
"""Threads that ask processes, which may keep them waiting."""
KEPT = 16
"""Runs without a listener whose place in the files is remembered."""

_ALIVE = b": alive\n\n"


class Feed:
    """The news of one run, looked for as long as somebody listens. To be used in one event loop."""

    def __init__(
        self,
        history: History,
        progress: Callable[[], Progress],
        services: Callable[[], Sequence[ServiceInfo]],
        readers: ThreadPoolExecutor,
        askers: ThreadPoolExecutor,
    ) -> None:
        self._history, self._progress, self._services = history, progress, services
        self._readers, self._askers = readers, askers
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._newest: dict[str, bytes] = {}
        self._states: dict[str, bytes] = {}
        """Of each kind of event that nobody writes down the newest that was seen, and the newest that may be told: what
        the run had on the disk by then has been looked for since."""
        self._health: list[tuple[str, str, str, str]] = []
        self.listeners = 0

    async def listen(self, after: Place | None, stopping: asyncio.Event) -> AsyncIterator[bytes]:
        """Everything after a place, or from now on, until ``stopping`` is set."""
        self.listeners += 1
        if self.listeners == 1:
            self._look_out(stopping)
        try:
            reader, rewound = await self._read(lambda: self._history.begin(after))
            if "progress" not in self._states:
                await self._look_at_progress()
                self._states = dict(self._newest)
            # The first event has an id: whoever loses the stream before the next one goes on from here, too.
            told = {"progress": self._states["progress"]}
            yield rewound + b"id: %s\n" % str(reader.place).encode() + told["progress"]
            while not stopping.is_set():
                changed, states = self._changed, self._states
                unsent = b""
                async for events in self._unread(reader):
                    if unsent:
                        yield unsent
                    unsent = events
                fresh = {kind: event for kind, event in states.items() if told.get(kind) != event}
                told |= fresh
                # As few pieces as there can be: with many listeners it is their number that costs.
                unsent += b"".join(fresh.values())
                if unsent:
                    yield unsent
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await changed.wait()
                except TimeoutError:
                    yield _ALIVE
            # A gateway ends with its run, of which the last steps may be untold.
            await self._read(self._history.refresh)
            async for events in self._unread(reader):
                yield events
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._rest()

    async def _unread(self, reader: Reader) -> AsyncIterator[bytes]:
        """What is on the disk and the reader has not heard."""
        while True:
            before = reader.place
            events = self._history.glance(reader)
            if events is None:
                events = await self._read(lambda: self._history.read(reader))
            if events:
                yield events
            if reader.place == before:
                return

    async def _read(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    async def _ask(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._askers, function)

    def _look_out(self, stopping: asyncio.Event) -> None:
        """Begins to look for news."""
        looks = ((self._look_at_files, TICK), (self._look_at_progress, TICK), (self._look_at_services, LOOK))
        self._tasks = [asyncio.create_task(self._keep_looking(look, pause)) for look, pause in looks]
        self._tasks.append(asyncio.create_task(self._end_with(stopping)))

    def _rest(self) -> None:
        """Looks no more; what was seen would be old when the next listener comes."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._newest, self._states = {}, {}
        self._health = []

    async def _keep_looking(self, look: Callable[[], Awaitable[None]], pause: float) -> None:
        said = ""
        while True:
            try:
                await look()
                said = ""
            except Exception as error:
                # Whoever listens waits for the next look; the log has why, once.
                if str(error) != said:
                    log.warning("a look at a run failed", error=str(error), kind=type(error).__name__)
                said = str(error)
            await asyncio.sleep(pause)

    async def _end_with(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._wake()

    async def _look_at_files(self) -> None:
        # Before the look: that a run has ended is told after its last step.
        newest = dict(self._newest)
        if await self._read(self._history.refresh) or newest != self._states:
            self._states = newest
            self._wake()

    async def _look_at_progress(self) -> None:
        progress = await self._ask(self._progress)
        self._show("progress", to_bytes("progress", progress.model_dump(mode="json")))

    async def _look_at_services(self) -> None:
        found = await self._ask(self._services)
        health = [(item.role, item.address, str(item.health), item.detail) for item in found]
        if health != self._health:
            self._health = health
            services = [item.model_dump(mode="json") for item in found]
            self._show("services", to_bytes("services", {"services": services}))

    def _show(self, kind: str, event: bytes) -> None:
        # Told at the next look at the files: so nobody is woken more often than that.
        self._newest[kind] = event

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Feeds:
    """The feeds of all runs that somebody listens to, and of the last that somebody did."""

    def __init__(
        self,
        runs: Runs,
        progress: Callable[[str], Progress],
        services: Callable[[str], Sequence[ServiceInfo]],
    ) -> None:
        """``progress`` says what a run does, also one that does nothing any more."""
        self._runs, self._progress, self._services = runs, progress, services
        self._feeds: OrderedDict[str, Feed] = OrderedDict()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="events")
        self._askers = ThreadPoolExecutor(ASKERS, thread_name_prefix="news")

    def of(self, name: str) -> Feed:
        """The feed of a run. Raises NotFound."""
        files = self._runs.find(name)
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = Feed(
                History(files), lambda: self._progress(name), lambda: self._services(name), self._readers, self._askers
            )
        self._feeds.move_to_end(name)
        silent = [other for other, found in self._feeds.items() if not found.listeners and found is not feed]
        for other in silent[: max(0, len(silent) - KEPT)]:
            del self._feeds[other]
        return feed

    def close(self) -> None:
        """Ends the threads; the streams have ended."""
        for pool in (self._readers, self._askers):
            pool.shutdown(wait=False, cancel_futures=True)
