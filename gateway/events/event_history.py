"""The history of a run as events. It is read from the run's files, so that any gateway can continue any stream."""

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

from quartet.gateway.events.event_cursor import FIRST_GENERATION, EventCursor
from quartet.gateway.readers.jsonl_tail import JsonlTail
from quartet.run_directory.checkpoints import DamagedCheckpoint, checkpoint_folders, checkpoint_step, read_checkpoint
from quartet.run_directory.run_files import RunFiles

log = structlog.get_logger()

MAX_BATCH = 500
"""Maximum number of events in one read."""
_MAX_CACHED_BATCHES = 16
"""Batches that are kept for other readers with the same cursor."""


@dataclass(slots=True)
class EventReader:
    """Position of one reader, and the number of the run's rollbacks that it has been sent."""

    cursor: EventCursor
    rollbacks: int


@dataclass(frozen=True, slots=True)
class _Event:
    """An event from a file. ``data`` is None if its line is damaged. ``order`` sorts by step, then by kind within a step."""

    order: tuple[int, int]
    kind: str
    data: dict[str, Any] | None
    advance: Callable[[EventCursor], EventCursor]


def encode_event(kind: str, data: Any, cursor: EventCursor | None = None) -> bytes:
    """Return a server-sent event; its id is the cursor, if there is one."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    identity = f"id: {cursor}\n" if cursor is not None else ""
    return f"{identity}event: {kind}\ndata: {text}\n\n".encode()


class EventHistory:
    """The events that the files of one run contain. Thread-safe."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._lines = {
            "steps": JsonlTail(files.metrics),
            "alerts": JsonlTail(files.alerts),
            "evaluations": JsonlTail(files.evaluation_summaries),
            "changes": JsonlTail(files.changes),
        }
        self._checkpoints: list[int] = []
        self._checkpoints_mtime = 0
        self._rollbacks: list[dict[str, int]] = []
        """For each rollback, the number of unchanged lines of each file that lost lines."""
        self._batches: dict[EventCursor, tuple[bytes, EventCursor]] = {}
        self._end = EventCursor()
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Index what was written since the last call. Return whether anything changed."""
        with self._lock:
            return self._refresh()

    def start(self, after: EventCursor | None) -> tuple[EventReader, bytes]:
        """Return a reader that continues after a cursor, or at the end of the history if the cursor is None.

        The second value is a ``rewind`` event if the cursor does not belong to the run's current history, otherwise empty.
        """
        with self._lock:
            self._refresh()
            if after is None:
                return EventReader(self._end, len(self._rollbacks)), b""
            if not self._contains(after):
                # The common part of the two histories is unknown: send everything again.
                return EventReader(EventCursor(), len(self._rollbacks)), _rewind_event(EventCursor())
            newest = min(after.checkpoint, self._end.checkpoint)
            return EventReader(replace(after, checkpoint=newest), len(self._rollbacks)), b""

    def read_cached(self, reader: EventReader) -> bytes | None:
        """Return the next events if no file must be read for them, else None."""
        # Without the lock, which is held while files are read. Each of these checks is atomic.
        if reader.rollbacks != len(self._rollbacks):
            return None
        if reader.cursor == self._end:
            return b""
        batch = self._batches.get(reader.cursor)
        if batch is None:
            return None
        events, reader.cursor = batch
        return events

    def read(self, reader: EventReader) -> bytes:
        """Return the next events, at most ``MAX_BATCH``; empty at the end."""
        with self._lock:
            rewind = self._apply_rollbacks(reader)
            if reader.cursor == self._end:
                return rewind
            if reader.cursor not in self._batches:
                if len(self._batches) >= _MAX_CACHED_BATCHES:
                    self._batches.pop(next(iter(self._batches)))
                self._batches[reader.cursor] = self._read(reader.cursor)
            events, reader.cursor = self._batches[reader.cursor]
            return rewind + events

    def _refresh(self) -> bool:
        # A checkpoint is written after its step. Looking for checkpoints first never shows one before its step.
        self._find_checkpoints()
        kept = {name: lines.refresh() for name, lines in self._lines.items()}
        lost = {name: count for name, count in kept.items() if count is not None}
        counts: dict[str, Any] = {name: len(lines) for name, lines in self._lines.items()}
        newest = self._checkpoints[-1] if self._checkpoints else 0
        end = self._with_generation(EventCursor(checkpoint=newest, **counts))
        if not lost and end == self._end:
            return False
        if lost:
            self._rollbacks.append(lost)
        self._end = end
        self._batches.clear()
        return True

    def _find_checkpoints(self) -> None:
        try:
            mtime = self._files.checkpoints.stat().st_mtime_ns
        except OSError:
            self._checkpoints, self._checkpoints_mtime = [], 0
            return
        if mtime != self._checkpoints_mtime:
            self._checkpoints = [checkpoint_step(folder) for folder in checkpoint_folders(self._files)]
            self._checkpoints_mtime = mtime

    def _apply_rollbacks(self, reader: EventReader) -> bytes:
        """Move a reader back to the lines that still exist. Return a ``rewind`` event if that moved it."""
        before = reader.cursor
        for lost in self._rollbacks[reader.rollbacks :]:
            counts = {name: min(getattr(reader.cursor, name), count) for name, count in lost.items()}
            reader.cursor = replace(reader.cursor, **counts)
        reader.rollbacks = len(self._rollbacks)
        moved = reader.cursor != before
        newest = min(reader.cursor.checkpoint, self._end.checkpoint)
        reader.cursor = self._with_generation(replace(reader.cursor, checkpoint=newest))
        return _rewind_event(reader.cursor) if moved else b""

    def _contains(self, cursor: EventCursor) -> bool:
        """Return whether a cursor belongs to the run's current history."""
        in_range = all(getattr(cursor, name) <= len(lines) for name, lines in self._lines.items())
        return in_range and self._with_generation(cursor).generation == cursor.generation

    def _with_generation(self, cursor: EventCursor) -> EventCursor:
        """Return the cursor with the generation of its line counts."""
        last = [lines.checksum(getattr(cursor, name)) for name, lines in self._lines.items()]
        if not any(last):
            return replace(cursor, generation=FIRST_GENERATION)
        return replace(cursor, generation=f"{zlib.crc32(array('I', last).tobytes()):x}")

    def _read(self, cursor: EventCursor) -> tuple[bytes, EventCursor]:
        sources = (
            self._events_of_file("changes", "change", 0, cursor),
            self._events_of_file("steps", "step", 1, cursor),
            self._events_of_file("evaluations", "evaluation", 2, cursor),
            self._events_of_file("alerts", "alert", 3, cursor),
            self._events_of_checkpoints(cursor),
        )
        encoded = []
        for event in itertools.islice(heapq.merge(*sources, key=lambda event: event.order), MAX_BATCH):
            cursor = event.advance(cursor)
            if event.data is not None:
                encoded.append(encode_event(event.kind, event.data, cursor))
        return b"".join(encoded), cursor

    def _events_of_file(self, name: str, kind: str, rank: int, cursor: EventCursor) -> Iterator[_Event]:
        first, lines, step = getattr(cursor, name), self._lines[name], 0
        for number, line in enumerate(lines.read(first, MAX_BATCH), first + 1):
            data = _parse(line, lines, number)
            if data is not None:
                step = data["step"]
                data = _with_metrics(kind, data)
            yield _Event((step, rank), kind, data, self._advance(name, number))

    def _events_of_checkpoints(self, cursor: EventCursor) -> Iterator[_Event]:
        for step in self._checkpoints:
            if step > cursor.checkpoint:
                yield _Event((step, 4), "checkpoint", self._checkpoint(step), self._advance("checkpoint", step))

    def _advance(self, name: str, count: int) -> Callable[[EventCursor], EventCursor]:
        counts: dict[str, Any] = {name: count}
        return lambda cursor: self._with_generation(replace(cursor, **counts))

    def _checkpoint(self, step: int) -> dict[str, Any] | None:
        path = self._files.checkpoints / f"step-{step:06d}"
        try:
            return {"step": step, "bytes": read_checkpoint(path).bytes, "created": path.stat().st_mtime}
        except (DamagedCheckpoint, OSError):  # Removed meanwhile, or not a checkpoint.
            return None


def _with_metrics(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of an event from a line of a file. The values of steps and evaluations are below ``metrics``."""
    if kind == "step":
        return {"step": data["step"], "metrics": data}
    if kind == "evaluation":
        metrics = {name: value for name, value in data.items() if name != "policy_version"}
        return {"step": data["step"], "policy_version": data.get("policy_version"), "metrics": metrics}
    return data


def _rewind_event(cursor: EventCursor) -> bytes:
    """Return the event that invalidates all events after a step; step 0 invalidates all of them."""
    return encode_event("rewind", {"step": cursor.steps}, cursor)


def _parse(line: bytes, lines: JsonlTail, number: int) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
        if not isinstance(data["step"], int):
            raise ValueError("its step is not an integer")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("damaged line skipped", path=str(lines.path), line=number, error=str(error))
        return None
    return data


def _finite(text: str) -> float | None:
    """Parse a number; return None for infinity, which JSON cannot represent. Charts show null as a gap."""
    value = float(text)
    return value if math.isfinite(value) else None
