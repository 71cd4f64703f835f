"""JSON Lines files whose lines are objects with a ``step``: ``metrics.jsonl``, ``timeline.jsonl`` and others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.system.durable_files import append_durably, storage_errors, write_durably


def to_json_lines(items: Iterable[Mapping[str, Any]], ensure_ascii: bool = True) -> str:
    """Return one line of JSON for each item."""
    return "".join(json.dumps(item, ensure_ascii=ensure_ascii) + "\n" for item in items)


def append_step_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Append lines and flush them to the disk. Raises StorageFailed, with nothing appended, if the disk refuses."""
    with storage_errors(path):
        append_durably(path, to_json_lines(items))


def rewrite_step_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file in one step. Raises StorageFailed if the disk refuses."""
    text = to_json_lines(items)
    with storage_errors(path):
        write_durably(path, text)


def truncate_step_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``. Does nothing if there is no file."""
    if path.exists():
        rewrite_step_lines(path, (line for line in read_step_lines(path) if line["step"] <= step))


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """Return every line, or nothing if there is no file. Ignores a last line that a crash cut off.

    Raises ConfigError naming the line that is not JSON or has no step.
    """
    if not path.exists():
        return []
    *complete, _cut_off = path.read_bytes().split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(complete, 1):
        try:
            line = json.loads(text)
        except ValueError:
            raise _damaged(path, number, "not JSON") from None
        if not isinstance(line, dict) or "step" not in line:
            raise _damaged(path, number, "has no step")
        lines.append(line)
    return lines


def without_incomplete_command(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``changes`` without those of the last command if some of them are missing.

    All changes of a command have one time ``at``, and their number ``together`` if it is not 1.
    """
    if not changes:
        return changes
    last = len(changes)
    while last and changes[last - 1].get("at") == changes[-1].get("at"):
        last -= 1
    complete = len(changes) - last >= changes[-1].get("together", 1)
    return changes if complete else changes[:last]


def _damaged(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(f"{path.stem} {path}:{number}: {problem}; repair the file, or start a new run")


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
