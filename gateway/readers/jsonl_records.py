"""Small files of records, a JSON object a line: evaluations, alerts, what was set aside. Parsed again only when they change."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from quartet.errors import ConfigError
from quartet.gateway.runs.catalog import Signature, signature

KEPT = 64
"""Files of which the records are kept."""
MAX_BYTES = 64 * 1024 * 1024
"""Of one file."""

Record = dict[str, Any]
Shape = TypeVar("Shape", bound=BaseModel)


class Records:
    """Files that were asked for lately. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Signature, list[Record]]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> list[Record]:
        """Every record; none where there is no file. A last line that was cut off is none. Raises ConfigError."""
        try:
            seen = signature(path)
            with self._lock:
                known = self._kept.get(path)
            if known is not None and known[0] == seen:
                return known[1]
            if seen[2] > MAX_BYTES:
                raise ConfigError(
                    f"{path}: has {seen[2]} bytes, expected at most {MAX_BYTES}; read it with other means"
                )
            records = parse_lines(path, path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); let the gateway's user read it") from None
        with self._lock:
            self._kept[path] = (seen, records)
            self._kept.move_to_end(path)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return records


def shaped(model: type[Shape], path: Path, records: Sequence[Record], first: int) -> list[Shape]:
    """Records as messages of the API, the first being line ``first``. Raises ConfigError naming the line that is none."""
    found = []
    for number, record in enumerate(records, first):
        try:
            found.append(model.model_validate(record))
        except ValueError:
            raise ConfigError(
                f"{path}:{number}: not a line that Quartet writes there; mend the file, or put it back from a copy"
            ) from None
    return found


def parse_lines(path: Path, content: bytes, first: int = 1) -> list[Record]:
    """The records of whole lines, of which the first has this number. Raises ConfigError naming the line that is none."""
    *whole, _cut_off = content.split(b"\n")
    return [parse_line(path, line, number) for number, line in enumerate(whole, first)]


def parse_line(path: Path, line: bytes, number: int) -> Record:
    """One record. Raises ConfigError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: not a JSON object; mend the file, or put it back from a copy")
    return record
