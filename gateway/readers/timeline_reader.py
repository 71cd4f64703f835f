"""The timelines of runs, ``timeline.jsonl``: the work of each process during a step. Only the requested line is parsed."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from quartet.gateway.readers.jsonl_records import Record, parse_line
from quartet.gateway.readers.jsonl_tail import JsonlTail

LINES_PER_READ = 2000
_STEP = re.compile(rb'\{"step": ?(\d{1,12})[,}]')


class Timeline:
    """The timeline of one run. It keeps the line number of each step. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = JsonlTail(path)
        self._indexed_lines = 0
        self._line_of_step: dict[int, int] = {}
        self._lock = threading.Lock()

    def step(self, step: int) -> Record | None:
        """Return the timeline of one step, or None if the file does not have it. Raises ConfigError if its line is damaged."""
        with self._lock:
            if self._lines.refresh() is not None:
                self._indexed_lines, self._line_of_step = 0, {}
            while lines := self._lines.read(self._indexed_lines, LINES_PER_READ):
                for number, line in enumerate(lines, self._indexed_lines):
                    # If a step was repeated, its last line counts. Fragments that a crash left behind are skipped.
                    if (match := _STEP.match(line)) and line.endswith(b"}"):
                        self._line_of_step[int(match[1])] = number
                self._indexed_lines += len(lines)
            number = self._line_of_step.get(step, -1)
            lines = self._lines.read(number, 1) if number >= 0 else []
        return parse_line(self._path, lines[0], number + 1) if lines else None
