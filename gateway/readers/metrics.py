"""The metrics of runs as columns: read once, then only what has come since, so that a question costs no parsing."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ConfigError
from quartet.gateway.events.jsonl_tail import Lines

FloatColumn = NDArray[np.float64]

AT_ONCE = 2000
"""Lines that are parsed at once."""
MAX_BYTES = 512 * 1024 * 1024
"""Of all columns that are kept; those of the runs that were asked for last stay."""
MAX_NAMES = 1000
"""Metrics of one run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric: for each point the last of its steps, and mean, least and greatest over them; NaN where there is none."""

    steps: list[int]
    mean: FloatColumn
    low: FloatColumn
    high: FloatColumn


@dataclass(frozen=True, slots=True)
class Curves:
    """Metrics of one run from step ``first`` to ``last``; a point stands for ``bucket`` steps, the last one for what is left."""

    first: int
    last: int
    bucket: int
    curves: dict[str, Curve]


class Columns:
    """``metrics.jsonl`` of one run. Row ``i`` is step ``i + 1``. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = Lines(path)
        self._taken = 0
        """Lines of the file that were looked at."""
        self._count = 0
        self._columns: dict[str, FloatColumn] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the columns."""
        return sum(column.nbytes for column in list(self._columns.values()))

    def refresh(self) -> None:
        """Takes in what has been written since. Raises ConfigError naming the line that is not a step's."""
        with self._lock:
            kept = self._lines.refresh()
            if kept is not None:
                # Steps were taken back. Rows are lines unless a former leader's are between them.
                rows = kept if self._count == self._taken else 0
                self._count = self._taken = min(rows, self._count)
            while lines := self._lines.read(self._taken, AT_ONCE):
                self._take(lines)

    def count(self) -> int:
        """Steps that are committed."""
        return self._count

    def names(self) -> list[str]:
        """Of the metrics, as the file has them, without ``step``."""
        with self._lock:
            return [name for name, column in self._columns.items() if _has_number(column[: self._count])]

    def row(self, step: int) -> dict[str, float | None]:
        """One step's metrics; None for one that the step has not. ``step`` is at most ``count()``."""
        with self._lock:
            return {name: _plain(column[step - 1]) for name, column in self._columns.items()}

    def rows(self, steps: Sequence[int], names: Sequence[str]) -> list[dict[str, float | None]]:
        """A few metrics of some steps."""
        with self._lock:
            found = {name: self._columns.get(name) for name in names}
            return [
                {name: None if column is None else _plain(column[step - 1]) for name, column in found.items()}
                for step in steps
                if step <= self._count
            ]

    def curves(self, names: Sequence[str], first: int, last: int, points: int) -> Curves:
        """Metrics from step ``first`` to ``last``, in at most ``points`` points. A metric that no step has is all NaN."""
        with self._lock:
            first, last = max(first, 1), min(last, self._count)
            if first > last:
                return Curves(0, 0, 1, {name: _empty() for name in names})
            bucket = math.ceil((last - first + 1) / points)
            starts = np.arange(0, last - first + 1, bucket)
            ends = np.append(starts[1:], last - first + 1)
            steps: list[int] = (ends + first - 1).tolist()
            missing = np.full(last - first + 1, np.nan)
            found = {}
            for name in names:
                column = self._columns.get(name)
                values = missing if column is None else column[first - 1 : last]
                found[name] = Curve(steps, *_buckets(values, starts, ends - starts))
            return Curves(first, last, bucket, found)

    def _take(self, lines: list[bytes]) -> None:
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, self._taken + 1):
            row = self._row(line, number)
            expected = self._count + len(rows) + 1
            if row["step"] == expected:
                rows.append(row)
            elif row["step"] > expected:
                raise self._damaged(number, f"is not step {expected}")
            # An earlier step's line is of a former leader, and no commit.
        self._make_room(rows)
        for name, column in self._columns.items():
            column[self._count : self._count + len(rows)] = [row.get(name, math.nan) for row in rows]
        self._count += len(rows)
        self._taken += len(lines)

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number, "not JSON") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 < row["step"] < 2**53:
            raise self._damaged(number, "of no step")
        for name, value in row.items():
            if type(value) is not float and type(value) is not int and value is not None:
                raise self._damaged(number, f"{name} is no number")
            if value is None or not -1e308 < value < 1e308:
                # JSON has neither infinity nor NaN: both are 'no number' to whoever asks.
                row[name] = math.nan
        return row

    def _make_room(self, rows: list[dict[str, Any]]) -> None:
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
                wider = np.full(room, np.nan)
                if column is not None:
                    wider[: self._count] = column[: self._count]
                self._columns[name] = wider

    def _damaged(self, number: int, problem: str) -> ConfigError:
        return ConfigError(f"metrics {self._path}:{number}: {problem}; mend the file, or start the run anew")


class Metrics:
    """The columns of every run that was asked for lately."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Path, Columns] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> Columns:
        """The columns of a ``metrics.jsonl``, as it is now; empty where it is not there. Raises ConfigError."""
        with self._lock:
            columns = self._kept.setdefault(path, Columns(path))
            self._kept.move_to_end(path)
        columns.refresh()
        with self._lock:
            while len(self._kept) > 1 and sum(kept.size for kept in self._kept.values()) > self._most_bytes:
                self._kept.popitem(last=False)
        return columns


def _buckets(
    values: FloatColumn, starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Mean, least and greatest of each bucket ``[points]``; NaN does not count, and is what a bucket without values gives."""
    if len(starts) == len(values):
        own = values.copy()
        return own, own, own
    absent = np.isnan(values)
    counts = sizes - np.add.reduceat(absent, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(absent, 0.0, values), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    return mean, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _has_number(values: FloatColumn) -> bool:
    # Nearly always the newest one is: then there is no need to look at all of them.
    return len(values) > 0 and not (np.isnan(values[-1]) and np.isnan(values).all())


def _empty() -> Curve:
    none = np.empty(0)
    return Curve([], none, none, none)


def _plain(value: np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
