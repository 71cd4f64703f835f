"""The complete lines of a JSON Lines file that is appended to or replaced, indexed by number.

A rollback rewrites a run's files without the lines that it takes back. Each line is identified by its checksum, so the common
prefix of the old and the new file is known. A file rewritten with the same lines does not count as changed.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""


class JsonlTail:
    """The complete lines of one file. A last line without a line break is ignored until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = array("Q")
        self._checksums = array("I")
        self._identity: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def checksum(self, count: int) -> int:
        """Return the checksum of line number ``count`` (from 1), or 0 if ``count`` is 0."""
        return self._checksums[count - 1] if count else 0

    def refresh(self) -> int | None:
        """Index new lines. If known lines were removed or changed, return how many at the start are still the same."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            kept, self._identity = (0 if len(self) else None), None
            self._truncate(0)
            return kept
        with file:
            identity = _identity(file)
            if identity == self._identity:
                return None
            may_have_grown = (
                self._identity is not None and identity[0] == self._identity[0] and identity[1] >= self._end(len(self))
            )
            kept = None if may_have_grown and self._index_appended(file) else self._reindex(file)
            self._identity = identity
        return kept

    def read(self, first: int, count: int) -> list[bytes]:
        """Return at most ``count`` lines from number ``first`` (from 0); fewer if the file was replaced meanwhile."""
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
        """Return the offset in bytes after the first ``count`` lines."""
        return self._ends[count - 1] if count else 0

    def _truncate(self, count: int) -> None:
        del self._ends[count:]
        del self._checksums[count:]

    def _index_appended(self, file: BinaryIO) -> bool:
        """Index the lines after the last known one. Return False if that line has changed or is gone."""
        known = max(0, len(self) - 1)
        lines = _lines_from(file, self._end(known))
        if len(self):
            first = next(lines, None)
            if first is None or zlib.crc32(first) != self._checksums[known]:
                return False
        for line in lines:
            self._append(line)
        return True

    def _reindex(self, file: BinaryIO) -> int | None:
        """Index the whole file. Return the length of the common prefix, or None if no known line is missing."""
        before = self._checksums[:]
        self._truncate(0)
        common = 0
        for line in _lines_from(file, 0):
            self._append(line)
            if common == len(self) - 1 and common < len(before) and before[common] == self._checksums[common]:
                common += 1
        return common if common < len(before) else None

    def _append(self, line: bytes) -> None:
        self._ends.append(self._end(len(self)) + len(line) + 1)
        self._checksums.append(zlib.crc32(line))


def _identity(file: BinaryIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _lines_from(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield every complete line from an offset, without its line break."""
    file.seek(offset)
    rest = b""
    while block := file.read(BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
