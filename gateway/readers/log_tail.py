"""The last lines of log files. A log may be larger than memory, so it is read backwards from its end."""

from __future__ import annotations

import stat
from pathlib import Path

BLOCK_BYTES = 64 * 1024
MAX_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes that are read from the end of a log."""
MAX_LINE_LENGTH = 20_000
"""Maximum number of characters of a line in a response."""


def log_files(folder: Path) -> dict[str, Path]:
    """Return the regular ``*.log`` files of a folder by their names without the suffix. Links are left out."""
    try:
        paths = sorted(folder.glob("*.log"))
    except OSError:
        return {}
    return {path.stem: path for path in paths if _is_regular_file(path)}


def last_lines(path: Path, count: int) -> tuple[list[str], bool]:
    """Return the last ``count`` lines, and whether there are earlier ones. Raises OSError."""
    with path.open("rb") as file:
        start = end = file.seek(0, 2)
        blocks: list[bytes] = []
        line_breaks = 0
        while start > 0 and line_breaks <= count and end - start < MAX_BYTES:
            size = min(BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            blocks.append(file.read(size))
            line_breaks += blocks[-1].count(b"\n")
    lines = b"".join(reversed(blocks)).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    # The first line is incomplete unless the whole file was read.
    complete = lines if start == 0 or len(lines) <= 1 else lines[1:]
    shown = complete[-count:]
    return [_text(line) for line in shown], start > 0 or len(complete) > count


def _text(line: bytes) -> str:
    text = line.rstrip(b"\r").decode(errors="replace")
    return text if len(text) <= MAX_LINE_LENGTH else text[:MAX_LINE_LENGTH] + "…"


def _is_regular_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
