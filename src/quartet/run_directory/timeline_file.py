"""``timeline.jsonl``: one line for each step. It is not flushed to the disk, because nothing depends on it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STEP = re.compile(rb'\{"step": (\d+)[,}]')
"""The start of a line. Timelines are long, and only the step is needed."""
_CHUNK = 1 << 20


def append_timeline(path: Path, line: Mapping[str, Any]) -> None:
    """Append a step's line, whose first key is ``step``. Raises OSError, with nothing appended, if that fails."""
    text = (json.dumps(line) + "\n").encode()
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if (
                file.read(1) != b"\n"
            ):  # A crash truncated the last line. End it, so that it does not damage the next one.
                text = b"\n" + text
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


def truncate_timeline(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``. Raises OSError."""
    end = _end_of(path, step)
    if end == path.stat().st_size:
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        with path.open("rb") as source, partial.open("wb") as target:
            while end:
                end -= target.write(source.read(min(end, _CHUNK)))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _end_of(path: Path, step: int) -> int:
    """Return the offset of the first line that is of a later step or truncated."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            result = _STEP.match(line)
            if not line.endswith(b"\n") or (result is not None and int(result[1]) > step):
                break
            end += len(line)
    return end
