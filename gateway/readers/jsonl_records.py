"""Small JSON Lines files, such as evaluations, alerts and failed trajectories. They are parsed again only after a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from quartet.errors import ConfigError

MAX_FILE_BYTES = 64 * 1024 * 1024

Record = dict[str, Any]
Item = TypeVar("Item")


def read_records(path: Path) -> list[Record]:
    """Return every record of a file. An incomplete last line is ignored. Raises ConfigError, and OSError if there is no file."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: has {size} bytes; the gateway reads at most {MAX_FILE_BYTES}; open it with another tool"
        )
    return parse_lines(path, path.read_bytes())


def validated(kind: type[Item], path: Path, records: Sequence[Record], first: int) -> list[Item]:
    """Return records as objects of a schema or dataclass. ``first`` is the line number of the first record.

    Raises ConfigError with the line number of an invalid record.
    """
    items, validator = [], TypeAdapter(kind)
    for number, record in enumerate(records, first):
        try:
            items.append(validator.validate_python(record))
        except ValueError:
            raise ConfigError(
                f"{path}:{number}: not a line in Quartet's format; repair the file, or restore it from a copy"
            ) from None
    return items


def parse_lines(path: Path, content: bytes) -> list[Record]:
    """Return the records of the complete lines. Raises ConfigError."""
    *lines, _incomplete = content.split(b"\n")
    return [parse_line(path, line, number) for number, line in enumerate(lines, 1)]


def parse_line(path: Path, line: bytes, number: int) -> Record:
    """Return one record. Raises ConfigError with the line number."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: not a JSON object; repair the file, or restore it from a copy")
    return record
