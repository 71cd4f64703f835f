"""The trajectories of runs. Values to filter and sort by are kept in arrays; texts stay on disk until they are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ConfigError
from quartet.gateway.readers.jsonl_records import Record, parse_line

SortKey = tuple[float, int, int, int]
"""Position in a sorted list: the sorted value, then step, prompt and sample."""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """The trajectories of one step in the order of the file's lines. All arrays are ``[trajectories]``."""

    path: Path
    step: int
    starts: NDArray[np.int64]
    """Offset of each line in bytes, followed by the file's size: ``[trajectories + 1]``."""
    prompts: NDArray[np.int64]
    samples: NDArray[np.int64]
    score: NDArray[np.float64]
    """NaN in a run without scores."""
    kl: NDArray[np.float64]
    response_tokens: NDArray[np.int64]
    finished: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompts)

    def line_of(self, prompt: int, sample: int) -> int | None:
        """Return the line of a trajectory, or None if the step has no such trajectory."""
        lines = np.flatnonzero((self.prompts == prompt) & (self.samples == sample))
        return int(lines[0]) if len(lines) else None

    def neighbours(self, line: int) -> tuple[int | None, int | None]:
        """Return the lines with the next lower and the next higher score. Of equal scores, the earlier line is lower.

        Both are None without scores.
        """
        if np.isnan(self.score[line]):
            return None, None
        order = np.argsort(self.score, kind="stable")
        rank = int(np.flatnonzero(order == line)[0])
        lower = int(order[rank - 1]) if rank > 0 else None
        higher = int(order[rank + 1]) if rank + 1 < len(order) else None
        return lower, higher

    def read(self, lines: list[int]) -> list[Record]:
        """Return the records of some lines in the given order. Raises ConfigError."""
        with _open(self.path) as file:
            records = []
            for line in lines:
                file.seek(int(self.starts[line]))
                content = file.read(int(self.starts[line + 1] - self.starts[line]))
                records.append(parse_line(self.path, content, line + 1))
        return records


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """Conditions on trajectories. None means no condition."""

    min_score: float | None = None
    max_score: float | None = None
    min_kl: float | None = None
    max_kl: float | None = None
    min_response_tokens: int | None = None
    max_response_tokens: int | None = None
    finished: bool | None = None
    text: str | None = None
    """Contained in the prompt or the response, ignoring case."""

    def mask(self, index: StepIndex) -> NDArray[np.bool_]:
        """Return which trajectories match all conditions except the text: ``[trajectories]``."""
        mask = np.ones(len(index), dtype=np.bool_)
        for values, low, high in (
            (index.score, self.min_score, self.max_score),
            (index.kl, self.min_kl, self.max_kl),
            (index.response_tokens, self.min_response_tokens, self.max_response_tokens),
        ):
            if low is not None:
                mask &= values >= low
            if high is not None:
                mask &= values <= high
        if self.finished is not None:
            mask &= index.finished == self.finished
        return mask

    def lines(self, index: StepIndex) -> NDArray[np.int64]:
        """Return the lines of a step that match all conditions. Raises ConfigError."""
        lines = np.flatnonzero(self.mask(index))
        if self.text is None or not len(lines):
            return lines
        text = self.text.casefold()
        records = index.read(lines.tolist())
        contains = [text in record["prompt"].casefold() or text in record["response"].casefold() for record in records]
        return lines[np.array(contains, dtype=np.bool_)]


@dataclass(frozen=True, slots=True)
class TrajectoryPage:
    """A page of trajectories with their steps, the number of all matches, and the last sort key if more pages follow."""

    records: list[tuple[int, Record]]
    total: int
    last_key: SortKey | None


def page_of(
    indexes: Sequence[StepIndex], matching: TrajectoryFilter, sort: str, limit: int, after: SortKey | None
) -> TrajectoryPage:
    """Return at most ``limit`` trajectories of some steps after a sort key. Raises ConfigError.

    ``sort`` is ``score``, ``kl``, ``response_tokens`` or ``id``; ``-`` in front sorts the largest value first.
    """
    matches = [matching.lines(index) for index in indexes]
    owners = np.repeat(np.arange(len(indexes)), [len(lines) for lines in matches])
    lines = np.concatenate(matches) if matches else np.empty(0, dtype=np.int64)
    columns = _sort_columns(indexes, matches, sort)
    # np.lexsort sorts by the last key first.
    order = np.lexsort(tuple(reversed(columns)))
    start = 0 if after is None else _count_up_to(columns, after)
    page = order[start : start + limit]
    records: dict[int, Record] = {}
    for owner in np.unique(owners[page]).tolist():
        positions = [int(position) for position in page if owners[position] == owner]
        read = indexes[owner].read([int(lines[position]) for position in positions])
        records |= dict(zip(positions, read, strict=True))
    more = start + limit < len(order)
    last = int(page[-1]) if more else -1
    return TrajectoryPage(
        [(indexes[int(owners[position])].step, records[int(position)]) for position in page],
        len(order),
        (float(columns[0][last]), *(int(column[last]) for column in columns[1:])) if more else None,  # type: ignore[arg-type]
    )


def _sort_columns(indexes: Sequence[StepIndex], matches: list[NDArray[np.int64]], sort: str) -> list[NDArray[Any]]:
    """Return the keys to sort by in ascending order, the first key first: ``[trajectories]`` each."""
    name = sort.removeprefix("-")
    sign = -1.0 if sort.startswith("-") else 1.0
    pairs = list(zip(indexes, matches, strict=True))
    if not pairs:
        return [np.empty(0) for _ in range(4)]
    values = [
        # Without scores, all are equal.
        sign * np.nan_to_num(getattr(index, name)[lines].astype(np.float64)) if name != "id" else np.zeros(len(lines))
        for index, lines in pairs
    ]
    return [
        np.concatenate(values),
        np.concatenate([np.full(len(lines), index.step) for index, lines in pairs]),
        np.concatenate([index.prompts[lines] for index, lines in pairs]),
        np.concatenate([index.samples[lines] for index, lines in pairs]),
    ]


def _count_up_to(columns: list[NDArray[Any]], key: SortKey) -> int:
    """Return the number of trajectories that sort before or at a key."""
    count = len(columns[0])
    greater = np.zeros(count, dtype=np.bool_)
    equal = np.ones(count, dtype=np.bool_)
    for column, value in zip(columns, key, strict=True):
        greater |= equal & (column > value)
        equal &= column == value
    return count - int(greater.sum())


def build_index(path: Path) -> StepIndex:
    """Read the file of a step, step-NNNNNN.jsonl. Raises ConfigError."""
    ends = [0]
    rows = []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            ends.append(ends[-1] + len(line))
            rows.append(_index_row(path, parse_line(path, line, number), number))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    return StepIndex(
        path,
        int(path.stem.removeprefix("step-")),
        np.array(ends, dtype=np.int64),
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.float64),
        np.array(columns[3], dtype=np.float64),
        np.array(columns[4], dtype=np.int64),
        np.array(columns[5], dtype=np.bool_),
    )


def _index_row(path: Path, record: Record, number: int) -> tuple[int, int, float, float, int, bool]:
    try:
        prompt, sample = (int(part) for part in str(record["id"]).rsplit("/", 2)[1:])
        if not (isinstance(record["prompt"], str) and isinstance(record["response"], str)):
            raise TypeError
        score, kl = (None if record["score"] is None else float(record["score"])), float(record["kl"])
        if not (math.isfinite(score or 0.0) and math.isfinite(kl)):
            raise ValueError
        return (
            prompt,
            sample,
            math.nan if score is None else score,
            kl,
            int(record["response_tokens"]),
            bool(record["finished"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{path}:{number}: not a trajectory in Quartet's format; restore the file from a copy, or remove it"
        ) from None


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the gateway's user read permission"
        ) from None


def step_window(first: int | None, last: int | None, newest: int, default_length: int) -> range:
    """Return the steps of a request. Without a first step, the window has the ``default_length`` newest steps."""
    end = newest if last is None else min(last, newest)
    start = first if first is not None else max(1, end - default_length + 1)
    return range(start, end + 1)
