"""Trajectories of a run: what can be filtered and sorted by is kept as arrays, the texts stay on the disk until shown."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ConfigError
from quartet.gateway.readers.jsonl_records import Record, parse_line
from quartet.gateway.runs.catalog import Signature, signature

KEPT = 20_000
"""Steps of which the arrays are kept, over all runs."""
Order = tuple[float, int, int, int]
"""By what trajectories are sorted: the figure, then step, prompt and sample."""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """The trajectories of one step, in the order of the file's lines: all arrays are ``[trajectories]``."""

    path: Path
    step: int
    starts: NDArray[np.int64]
    """Bytes before each line, and last the file's size: ``[trajectories + 1]``."""
    prompts: NDArray[np.int64]
    samples: NDArray[np.int64]
    score: NDArray[np.float64]
    kl: NDArray[np.float64]
    response_tokens: NDArray[np.int64]
    finished: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompts)

    def place(self, prompt: int, sample: int) -> int | None:
        """The line of a trajectory."""
        found = np.flatnonzero((self.prompts == prompt) & (self.samples == sample))
        return int(found[0]) if len(found) else None

    def neighbours(self, line: int) -> tuple[int | None, int | None]:
        """The lines of the next lower and the next higher score; of equal ones the earlier counts as lower."""
        order = np.argsort(self.score, kind="stable")
        place = int(np.flatnonzero(order == line)[0])
        lower = int(order[place - 1]) if place > 0 else None
        higher = int(order[place + 1]) if place + 1 < len(order) else None
        return lower, higher

    def read(self, lines: list[int]) -> list[Record]:
        """The records of some lines, in the order asked for. Raises ConfigError."""
        with _opened(self.path) as file:
            records = []
            for line in lines:
                file.seek(int(self.starts[line]))
                content = file.read(int(self.starts[line + 1] - self.starts[line]))
                records.append(parse_line(self.path, content, line + 1))
        return records


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories are wanted. None sets no bound."""

    min_score: float | None = None
    max_score: float | None = None
    min_kl: float | None = None
    max_kl: float | None = None
    min_response_tokens: int | None = None
    max_response_tokens: int | None = None
    finished: bool | None = None
    text: str | None = None
    """Stands in the prompt or the response, in whatever case."""

    def matches(self, index: StepIndex) -> NDArray[np.bool_]:
        """``[trajectories]``, by everything but the text."""
        found = np.ones(len(index), dtype=np.bool_)
        for values, low, high in (
            (index.score, self.min_score, self.max_score),
            (index.kl, self.min_kl, self.max_kl),
            (index.response_tokens, self.min_response_tokens, self.max_response_tokens),
        ):
            if low is not None:
                found &= values >= low
            if high is not None:
                found &= values <= high
        if self.finished is not None:
            found &= index.finished == self.finished
        return found

    def lines(self, index: StepIndex) -> NDArray[np.int64]:
        """The lines of a step that are wanted. Raises ConfigError."""
        lines = np.flatnonzero(self.matches(index))
        if self.text is None or not len(lines):
            return lines
        wanted = self.text.casefold()
        records = index.read(lines.tolist())
        inside = [
            wanted in record["prompt"].casefold() or wanted in record["response"].casefold() for record in records
        ]
        return lines[np.array(inside, dtype=np.bool_)]


@dataclass(frozen=True, slots=True)
class Found:
    """A page of trajectories with their steps, how many there are in all, and the order of the last one if more follow."""

    records: list[tuple[int, Record]]
    total: int
    after: Order | None


class Trajectories:
    """The indices of the steps that were asked for lately. Safe to use from several threads."""

    def __init__(self, kept: int = KEPT) -> None:
        self._most = kept
        self._kept: OrderedDict[Path, tuple[Signature, StepIndex]] = OrderedDict()
        self._lock = threading.Lock()

    def index(self, folder: Path, step: int) -> StepIndex | None:
        """What the trajectories of a step can be found by; None where there are none. Raises ConfigError."""
        path = folder / f"step-{step:06d}.jsonl"
        try:
            seen = signature(path)
        except OSError:
            return None
        with self._lock:
            known = self._kept.get(path)
            if known is not None and known[0] == seen:
                self._kept.move_to_end(path)
                return known[1]
        index = _index(path, step)
        with self._lock:
            self._kept[path] = (seen, index)
            self._kept.move_to_end(path)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return index

    def find(self, folder: Path, steps: range, wanted: Filter, sort: str, limit: int, after: Order | None) -> Found:
        """Trajectories of some steps, by ``score``, ``kl``, ``response_tokens`` (``-``: the greatest first) or ``id``.

        Those that come behind ``after``, at most ``limit``. Raises ConfigError.
        """
        indices: list[StepIndex] = []
        chosen: list[NDArray[np.int64]] = []
        for step in steps:
            if (index := self.index(folder, step)) is not None:
                indices.append(index)
                chosen.append(wanted.lines(index))
        owners = np.repeat(np.arange(len(indices)), [len(lines) for lines in chosen])
        lines = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
        columns = _columns(indices, chosen, sort)
        # The last key counts first.
        order = np.lexsort(tuple(reversed(columns)))
        begin = 0 if after is None else _behind(columns, order, after)
        page = order[begin : begin + limit]
        records: dict[int, Record] = {}
        for owner in np.unique(owners[page]).tolist():
            mine = [int(place) for place in page if owners[place] == owner]
            read = indices[owner].read([int(lines[place]) for place in mine])
            records |= dict(zip(mine, read, strict=True))
        more = begin + limit < len(order)
        last = int(page[-1]) if more else -1
        return Found(
            [(indices[int(owners[place])].step, records[int(place)]) for place in page],
            len(order),
            (float(columns[0][last]), *(int(column[last]) for column in columns[1:])) if more else None,  # type: ignore[arg-type]
        )


def _columns(indices: list[StepIndex], chosen: list[NDArray[np.int64]], sort: str) -> list[NDArray[Any]]:
    """What is sorted by, ascending, the first key first: ``[trajectories]`` each."""
    name = sort.removeprefix("-")
    sign = -1.0 if sort.startswith("-") else 1.0
    pairs = list(zip(indices, chosen, strict=True))
    if not pairs:
        return [np.empty(0) for _ in range(4)]
    figures = [
        sign * getattr(index, name)[lines].astype(np.float64) if name != "id" else np.zeros(len(lines))
        for index, lines in pairs
    ]
    return [
        np.concatenate(figures),
        np.concatenate([np.full(len(lines), index.step) for index, lines in pairs]),
        np.concatenate([index.prompts[lines] for index, lines in pairs]),
        np.concatenate([index.samples[lines] for index, lines in pairs]),
    ]


def _behind(columns: list[NDArray[Any]], order: NDArray[np.int64], after: Order) -> int:
    """How many come before or at ``after``."""
    beyond = np.zeros(len(order), dtype=np.bool_)
    level = np.ones(len(order), dtype=np.bool_)
    for column, value in zip(columns, after, strict=True):
        beyond |= level & (column > value)
        level &= column == value
    return len(order) - int(beyond.sum())


def _index(path: Path, step: int) -> StepIndex:
    """Reads a step's file. Raises ConfigError."""
    ends = [0]
    rows = []
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            ends.append(ends[-1] + len(line))
            rows.append(_figures(path, parse_line(path, line, number), number))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    return StepIndex(
        path,
        step,
        np.array(ends, dtype=np.int64),
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.float64),
        np.array(columns[3], dtype=np.float64),
        np.array(columns[4], dtype=np.int64),
        np.array(columns[5], dtype=np.bool_),
    )


def _figures(path: Path, record: Record, number: int) -> tuple[int, int, float, float, int, bool]:
    try:
        prompt, sample = (int(part) for part in str(record["id"]).rsplit("/", 2)[1:])
        if not (isinstance(record["prompt"], str) and isinstance(record["response"], str)):
            raise TypeError
        score, kl = float(record["score"]), float(record["kl"])
        if not (math.isfinite(score) and math.isfinite(kl)):
            raise ValueError
        return (
            prompt,
            sample,
            score,
            kl,
            int(record["response_tokens"]),
            bool(record["finished"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{path}:{number}: not a trajectory of Quartet's; put the file back from a copy, or remove it"
        ) from None


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); let the gateway's user read it") from None


def steps_of(first: int | None, last: int | None, newest: int, unbounded: int) -> range:
    """The steps that a question is about: those asked for, or else the newest ``unbounded`` ones."""
    top = newest if last is None else min(last, newest)
    bottom = first if first is not None else max(1, top - unbounded + 1)
    return range(bottom, top + 1)
