"""The ends of logs, read from the end: a log may be larger than memory."""

from __future__ import annotations

import stat
from pathlib import Path

BLOCK = 64 * 1024
MAX_BYTES = 4 * 1024 * 1024
"""Of a log that are looked at, however long its lines are."""
MAX_LINE = 20_000
"""Characters of a line that are shown."""


def log_files(folder: Path) -> dict[str, Path]:
    """Every log by its name without the ending; what is a link, or no file, is none."""
    try:
        paths = sorted(folder.glob("*.log"))
    except OSError:
        return {}
    return {path.stem: path for path in paths if _is_own(path)}


def last_lines(path: Path, count: int) -> tuple[list[str], bool]:
    """The last ``count`` lines, and whether there is more before them. Raises OSError."""
    with path.open("rb") as file:
        start = end = file.seek(0, 2)
        blocks: list[bytes] = []
        breaks = 0
        while start > 0 and breaks <= count and end - start < MAX_BYTES:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            blocks.append(file.read(size))
            breaks += blocks[-1].count(b"\n")
    lines = b"".join(reversed(blocks)).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    # What stands before the first break is part of a line unless the file begins there.
    whole = lines if start == 0 or len(lines) <= 1 else lines[1:]
    shown = whole[-count:]
    return [_text(line) for line in shown], start > 0 or len(whole) > count


def _text(line: bytes) -> str:
    text = line.rstrip(b"\r").decode(errors="replace")
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "…"


def _is_own(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
