"""What each process did when, step by step: ``timeline.jsonl``, of which only the line asked for is parsed."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

from quartet.gateway.events.jsonl_tail import Lines
from quartet.gateway.readers.jsonl_records import Record, parse_line

AT_ONCE = 2000
KEPT = 32
"""Runs of which the places of the steps are kept."""
_STEP = re.compile(rb'\{"step": ?(\d{1,12})[,}]')


class _Timeline:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = Lines(path)
        self._taken = 0
        self._line_of: dict[int, int] = {}
        self._lock = threading.Lock()

    def step(self, step: int) -> Record | None:
        with self._lock:
            if self._lines.refresh() is not None:
                self._taken, self._line_of = 0, {}
            while lines := self._lines.read(self._taken, AT_ONCE):
                for number, line in enumerate(lines, self._taken):
                    # Of a step that was taken twice, the last line is of the one that counts. Lines that a crash cut off stay.
                    if (found := _STEP.match(line)) and line.endswith(b"}"):
                        self._line_of[int(found[1])] = number
                self._taken += len(lines)
            number = self._line_of.get(step, -1)
            lines = self._lines.read(number, 1) if number >= 0 else []
        return parse_line(self._path, lines[0], number + 1) if lines else None


class Timelines:
    """The timelines of runs that were asked for lately. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, _Timeline] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, path: Path, step: int) -> Record | None:
        """The line of one step; None where none was kept. Raises ConfigError when it is damaged."""
        with self._lock:
            timeline = self._kept.setdefault(path, _Timeline(path))
            self._kept.move_to_end(path)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return timeline.step(step)
