"""Where a run's files stand: what has come since a place in them, in order, however often they were appended to or replaced.

A run that goes back writes its files anew without what it takes back. Lines are known by their checksums, so what both have in
common is known, too; one that was only written anew has not gone back.
"""

from __future__ import annotations

import os
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 20
"""Bytes of a file that are read at once."""
PLACE = r"^g[0-9a-f]{1,8}(\.[saeck]\d{1,15}){5}$"
_PLACE = re.compile(r"g([0-9a-f]{1,8})\.s(\d{1,15})\.a(\d{1,15})\.e(\d{1,15})\.c(\d{1,15})\.k(\d{1,15})", re.ASCII)
BEGINNING = "0"
"""Generation of a place before the first line, which all courses of a run have in common."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far somebody has read: lines of each file, and the newest checkpoint's step. Its text is the id of an event.

    ``generation`` is a checksum of the last line of each: a run that goes back takes its steps again, in other times.
    """

    generation: str = BEGINNING
    steps: int = 0
    alerts: int = 0
    evaluations: int = 0
    changes: int = 0
    checkpoint: int = 0

    def __str__(self) -> str:
        return f"g{self.generation}.s{self.steps}.a{self.alerts}.e{self.evaluations}.c{self.changes}.k{self.checkpoint}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place of an event's id. Raises ValueError."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text[:100]!r}: expected the id of an event of this run's stream, such as {Place('1f00ba', 7)}"
            )
        generation, *counts = found.groups()
        return cls(generation, *map(int, counts))


class Lines:
    """The whole lines of a file that grows at its end, or is replaced. A last line that has no end yet is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = array("Q")
        self._checksums = array("I")
        self._seen: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def checksum(self, count: int) -> int:
        """Of the last of the first ``count`` lines, 0 where there is none."""
        return self._checksums[count - 1] if count else 0

    def refresh(self) -> int | None:
        """Takes in what has changed. Where lines are gone or others, how many at the beginning are as they were."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            kept, self._seen = (0 if len(self) else None), None
            self._keep(0)
            return kept
        with file:
            about = _identity(file)
            if about == self._seen:
                return None
            grown = self._seen is not None and about[0] == self._seen[0] and about[1] >= self._end(len(self))
            kept = None if grown and self._read_on(file) else self._read_anew(file)
            self._seen = about
        return kept

    def read(self, first: int, count: int) -> list[bytes]:
        """Lines from number ``first`` (from 0) on, at most ``count``; fewer where the file was replaced meanwhile."""
        last = min(first + count, len(self))
        if first >= last:
            return []
        start = self._end(first)
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                data = file.read(self._end(last) - start)
        except FileNotFoundError:
            return []
        lines = data.split(b"\n")[: last - first]
        for number, line in enumerate(lines, first):
            if zlib.crc32(line) != self._checksums[number]:
                return lines[: number - first]
        return lines

    def _end(self, count: int) -> int:
        """Where the first ``count`` lines end."""
        return self._ends[count - 1] if count else 0

    def _keep(self, count: int) -> None:
        del self._ends[count:]
        del self._checksums[count:]

    def _read_on(self, file: BinaryIO) -> bool:
        """Takes in what follows the last known line. False where that line is another now, or no longer there."""
        known = max(0, len(self) - 1)
        lines = _lines_from(file, self._end(known))
        if len(self):
            first = next(lines, None)
            if first is None or zlib.crc32(first) != self._checksums[known]:
                return False
        for line in lines:
            self._add(line)
        return True

    def _read_anew(self, file: BinaryIO) -> int | None:
        """Takes the file for another. How many lines both begin with, or None where it has all that were known."""
        before = self._checksums[:]
        self._keep(0)
        common = 0
        for line in _lines_from(file, 0):
            self._add(line)
            if common == len(self) - 1 and common < len(before) and before[common] == self._checksums[common]:
                common += 1
        return common if common < len(before) else None

    def _add(self, line: bytes) -> None:
        self._ends.append(self._end(len(self)) + len(line) + 1)
        self._checksums.append(zlib.crc32(line))


def _identity(file: BinaryIO) -> tuple[int, int, int]:
    about = os.fstat(file.fileno())
    return about.st_ino, about.st_size, about.st_mtime_ns


def _lines_from(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Every line that has an end, without it."""
    file.seek(offset)
    rest = b""
    while block := file.read(BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
