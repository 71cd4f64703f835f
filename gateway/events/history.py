"""What has happened in a run, as events that anybody can read on from any place: nothing is kept that is not on the disk."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import structlog

from quartet.gateway.events.jsonl_tail import BEGINNING, Lines, Place
from quartet.run_directory.checkpoints import DamagedCheckpoint, checkpoint_folders, read_checkpoint, step_of
from quartet.run_directory.run_files import RunFiles

log = structlog.get_logger()

CHUNK = 500
"""Most events that are read at once."""
_SHARED = 16
"""Chunks that are kept for others at the same place."""


@dataclass(slots=True)
class Reader:
    """How far one reader has come, and how many of the run's returns it has heard of."""

    place: Place
    returns: int


@dataclass(frozen=True, slots=True)
class _Event:
    """An event that is durable; without data where its line is damaged. ``order``: by step, then as things go within one."""

    order: tuple[int, int]
    kind: str
    data: dict[str, Any] | None
    after: Callable[[Place], Place]


def to_bytes(kind: str, data: Any, place: Place | None = None) -> bytes:
    """An event as it is sent."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    identity = f"id: {place}\n" if place is not None else ""
    return f"{identity}event: {kind}\ndata: {text}\n\n".encode()


class History:
    """The durable events of one run. Safe to use from several threads."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._lines = {
            "steps": Lines(files.metrics),
            "alerts": Lines(files.alerts),
            "evaluations": Lines(files.evaluation_summaries),
            "changes": Lines(files.changes),
        }
        self._checkpoints: list[int] = []
        self._checkpoints_seen = 0
        self._returns: list[dict[str, int]] = []
        """Of each time that files lost lines: how many of which file are as they were."""
        self._shared: dict[Place, tuple[bytes, Place]] = {}
        self._present = Place()
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Takes in what has happened; whether anything has."""
        with self._lock:
            return self._refresh()

    def begin(self, after: Place | None) -> tuple[Reader, bytes]:
        """A reader at a place, or at the present. What it must hear first, if the place is none of this run's any more."""
        with self._lock:
            self._refresh()
            if after is None:
                return Reader(self._present, len(self._returns)), b""
            if not self._knows(after):
                # What they have in common is not known either: all of it is told anew.
                return Reader(Place(), len(self._returns)), _rewind(Place())
            newest = min(after.checkpoint, self._present.checkpoint)
            return Reader(replace(after, checkpoint=newest), len(self._returns)), b""

    def glance(self, reader: Reader) -> bytes | None:
        """What comes next, where that needs no waiting: nothing has come, or somebody else has read it just now."""
        # Without the lock, which is held while files are read: each of these looks is whole by itself.
        if reader.returns != len(self._returns):
            return None
        if reader.place == self._present:
            return b""
        known = self._shared.get(reader.place)
        if known is None:
            return None
        events, reader.place = known
        return events

    def read(self, reader: Reader) -> bytes:
        """What comes next, at most CHUNK events; nothing at the end."""
        with self._lock:
            said = self._turn_back(reader)
            if reader.place == self._present:
                return said
            if reader.place not in self._shared:
                if len(self._shared) >= _SHARED:
                    self._shared.pop(next(iter(self._shared)))
                self._shared[reader.place] = self._read(reader.place)
            events, reader.place = self._shared[reader.place]
            return said + events

    def _refresh(self) -> bool:
        # A checkpoint comes after its step: so none is seen before it.
        self._look_for_checkpoints()
        kept = {name: lines.refresh() for name, lines in self._lines.items()}
        lost = {name: count for name, count in kept.items() if count is not None}
        counts: dict[str, Any] = {name: len(lines) for name, lines in self._lines.items()}
        newest = self._checkpoints[-1] if self._checkpoints else 0
        present = self._known(Place(checkpoint=newest, **counts))
        if not lost and present == self._present:
            return False
        if lost:
            self._returns.append(lost)
        self._present = present
        self._shared.clear()
        return True

    def _look_for_checkpoints(self) -> None:
        try:
            changed = self._files.checkpoints.stat().st_mtime_ns
        except OSError:
            self._checkpoints, self._checkpoints_seen = [], 0
            return
        if changed != self._checkpoints_seen:
            self._checkpoints = [step_of(folder) for folder in checkpoint_folders(self._files)]
            self._checkpoints_seen = changed

    def _turn_back(self, reader: Reader) -> bytes:
        """Takes a reader back to what is still so; what it must hear of that."""
        before = reader.place
        for lost in self._returns[reader.returns :]:
            counts = {name: min(getattr(reader.place, name), count) for name, count in lost.items()}
            reader.place = replace(reader.place, **counts)
        reader.returns = len(self._returns)
        gone = reader.place != before
        newest = min(reader.place.checkpoint, self._present.checkpoint)
        reader.place = self._known(replace(reader.place, checkpoint=newest))
        return _rewind(reader.place) if gone else b""

    def _knows(self, place: Place) -> bool:
        """Whether the place is one of the run as it is."""
        whole = all(getattr(place, name) <= len(lines) for name, lines in self._lines.items())
        return whole and self._known(place).generation == place.generation

    def _known(self, place: Place) -> Place:
        """The place with the generation that its counts have."""
        last = [lines.checksum(getattr(place, name)) for name, lines in self._lines.items()]
        if not any(last):
            return replace(place, generation=BEGINNING)
        return replace(place, generation=f"{zlib.crc32(array('I', last).tobytes()):x}")

    def _read(self, place: Place) -> tuple[bytes, Place]:
        sources = (
            self._from_file("changes", "change", 0, place),
            self._from_file("steps", "step", 1, place),
            self._from_file("evaluations", "evaluation", 2, place),
            self._from_file("alerts", "alert", 3, place),
            self._from_checkpoints(place),
        )
        found = []
        for event in itertools.islice(heapq.merge(*sources, key=lambda event: event.order), CHUNK):
            place = event.after(place)
            if event.data is not None:
                found.append(to_bytes(event.kind, event.data, place))
        return b"".join(found), place

    def _from_file(self, name: str, kind: str, rank: int, place: Place) -> Iterator[_Event]:
        first, lines, step = getattr(place, name), self._lines[name], 0
        for number, line in enumerate(lines.read(first, CHUNK), first + 1):
            data = _parsed(line, lines, number)
            if data is not None:
                step = data["step"]
                data = {"step": step, "metrics": data} if kind in ("step", "evaluation") else data
            yield _Event((step, rank), kind, data, self._counted(name, number))

    def _from_checkpoints(self, place: Place) -> Iterator[_Event]:
        for step in self._checkpoints:
            if step > place.checkpoint:
                yield _Event((step, 4), "checkpoint", self._checkpoint(step), self._counted("checkpoint", step))

    def _counted(self, name: str, count: int) -> Callable[[Place], Place]:
        counts: dict[str, Any] = {name: count}
        return lambda place: self._known(replace(place, **counts))

    def _checkpoint(self, step: int) -> dict[str, Any] | None:
        path = self._files.checkpoints / f"step-{step:06d}"
        try:
            return {"step": step, "bytes": read_checkpoint(path).bytes, "created": path.stat().st_mtime}
        except (DamagedCheckpoint, OSError):  # Dropped meanwhile, or no checkpoint.
            return None


def _rewind(place: Place) -> bytes:
    """What came after the step counts no more, what comes now follows on it; after step 0 that is everything."""
    return to_bytes("rewind", {"step": place.steps}, place)


def _parsed(line: bytes, lines: Lines, number: int) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
        if not isinstance(data["step"], int):
            raise ValueError("its step is no whole number")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("a damaged line is no event", path=str(lines.path), line=number, error=str(error))
        return None
    return data


def _finite(text: str) -> float | None:
    """JSON knows no NaN and no infinity; whoever reads curves takes null for a gap."""
    value = float(text)
    return value if math.isfinite(value) else None
