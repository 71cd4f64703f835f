"""The metrics of runs as columns. ``metrics.jsonl`` is parsed once; later requests parse only the lines added since."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from quartet.errors import ConfigError
from quartet.gateway.readers.jsonl_tail import JsonlTail

FloatColumn = NDArray[np.float64]

LINES_PER_READ = 2000
"""Lines that are parsed at a time."""
MAX_NAMES = 1000
"""Metrics per run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps. If there are many steps, each point covers several in a row."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    steps: list[int]
    """The last step of each point."""
    mean: list[float | None]
    """Mean over the steps of a point; null if the metric is missing or not a number."""
    low: list[float | None]
    high: list[float | None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of one run."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    run: str
    first: int
    """First step of the curves; 0 if there are no steps."""
    last: int
    bucket: int
    """Maximum number of steps per point."""
    curves: dict[str, Curve]


class MetricColumns:
    """``metrics.jsonl`` of one run. Row ``i`` is step ``i + 1``. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = JsonlTail(path)
        self._parsed_lines = 0
        self._count = 0
        self._columns: dict[str, FloatColumn] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Size of the columns in bytes."""
        return sum(column.nbytes for column in list(self._columns.values()))

    def refresh(self) -> None:
        """Parse the lines added since the last call. Raises ConfigError with the number of an invalid line."""
        with self._lock:
            kept = self._lines.refresh()
            if kept is not None:
                # Steps were rolled back. Rows correspond to lines unless lines of a former leader are between them.
                rows = kept if self._count == self._parsed_lines else 0
                self._count = self._parsed_lines = min(rows, self._count)
            while lines := self._lines.read(self._parsed_lines, LINES_PER_READ):
                self._add_lines(lines)

    def count(self) -> int:
        """Number of committed steps."""
        return self._count

    def names(self) -> list[str]:
        """Return the names of the metrics in the file's order, without ``step``."""
        with self._lock:
            return [name for name, column in self._columns.items() if _has_number(column[: self._count])]

    def row(self, step: int) -> dict[str, float | None]:
        """Return all metrics of one step; None for a missing one. ``step`` is at most ``count()``."""
        with self._lock:
            return {name: _or_none(column[step - 1]) for name, column in self._columns.items()}

    def rows(self, steps: Sequence[int], names: Sequence[str]) -> list[dict[str, float | None]]:
        """Return some metrics of some steps."""
        with self._lock:
            columns = {name: self._columns.get(name) for name in names}
            return [
                {name: None if column is None else _or_none(column[step - 1]) for name, column in columns.items()}
                for step in steps
                if step <= self._count
            ]

    def curves(self, names: Sequence[str], first: int, last: int, points: int) -> Metrics:
        """Return metrics from step ``first`` to ``last`` in at most ``points`` points. An unknown metric is all NaN."""
        run = self._path.parent.name
        with self._lock:
            first, last = max(first, 1), min(last, self._count)
            if first > last:
                return Metrics(run, 0, 0, 1, {name: Curve([], [], [], []) for name in names})
            bucket = math.ceil((last - first + 1) / points)
            starts = np.arange(0, last - first + 1, bucket)
            ends = np.append(starts[1:], last - first + 1)
            steps: list[int] = (ends + first - 1).tolist()
            missing = np.full(last - first + 1, np.nan)
            curves = {}
            for name in names:
                column = self._columns.get(name)
                values = missing if column is None else column[first - 1 : last]
                curves[name] = Curve(steps, *(part.tolist() for part in _aggregate(values, starts, ends - starts)))
            return Metrics(run, first, last, bucket, curves)

    def _add_lines(self, lines: list[bytes]) -> None:
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, self._parsed_lines + 1):
            row = self._parse_row(line, number)
            expected = self._count + len(rows) + 1
            if row["step"] == expected:
                rows.append(row)
            elif row["step"] > expected:
                raise self._damaged(number, f"is not step {expected}")
            # A line of an earlier step was written by a former leader and is not a commit.
        self._grow(rows)
        for name, column in self._columns.items():
            column[self._count : self._count + len(rows)] = [row.get(name, math.nan) for row in rows]
        self._count += len(rows)
        self._parsed_lines += len(lines)

    def _parse_row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number, "not JSON") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 < row["step"] < 2**53:
            raise self._damaged(number, "has no step number")
        for name, value in row.items():
            if type(value) is not float and type(value) is not int and value is not None:
                raise self._damaged(number, f"{name} is not a number")
            if value is None or not -1e308 < value < 1e308:
                # JSON has neither infinity nor NaN. The API returns null for both.
                row[name] = math.nan
        return row

    def _grow(self, rows: list[dict[str, Any]]) -> None:
        """Make room for new rows, and add columns for new metrics."""
        wanted = self._count + len(rows)
        names = dict.fromkeys(name for row in rows for name in row if name != "step")
        if len(self._columns.keys() | names.keys()) > MAX_NAMES:
            raise ConfigError(
                f"metrics {self._path}: has more than {MAX_NAMES} metrics; expected the same few in each line"
            )
        room = max((len(column) for column in self._columns.values()), default=0)
        if room < wanted:
            room = max(wanted, 2 * room, 1024)
        for name in [*self._columns, *(name for name in names if name not in self._columns)]:
            column = self._columns.get(name)
            if column is None or len(column) < room:
                larger = np.full(room, np.nan)
                if column is not None:
                    larger[: self._count] = column[: self._count]
                self._columns[name] = larger

    def _damaged(self, number: int, problem: str) -> ConfigError:
        return ConfigError(f"metrics {self._path}:{number}: {problem}; repair the file, or restart the run")


def _aggregate(
    values: FloatColumn, starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Return mean, minimum and maximum of each bucket, ``[points]``. NaN is ignored; a bucket without values gives NaN."""
    if len(starts) == len(values):
        copied = values.copy()
        return copied, copied, copied
    missing = np.isnan(values)
    counts = sizes - np.add.reduceat(missing, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(missing, 0.0, values), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    return mean, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _has_number(values: FloatColumn) -> bool:
    # Check the newest value first: it is nearly always a number.
    return len(values) > 0 and not (np.isnan(values[-1]) and np.isnan(values).all())


def _or_none(value: np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
