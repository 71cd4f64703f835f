"""Logs: one line for each event, as key=value, on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import structlog


def configure_logs(role: str) -> None:
    """Configure structlog for this process. Every line contains the role."""
    structlog.configure(processors=_processors(role), logger_factory=lambda *_: _Lines(sys.stderr))


def file_log(role: str, path: Path) -> Any:
    """Return a separate log of the same form that appends to the file at ``path``."""
    output = path.open("a", encoding="utf-8", buffering=1)
    return structlog.wrap_logger(_Lines(output), processors=_processors(role))


class _Lines(structlog.PrintLogger):
    """Logger that prints line by line. Drops a line that cannot be written, for example on a full disk."""

    def msg(self, message: str) -> None:
        """Print a line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = failure = fatal = error = err = critical = exception = msg


def _without_members(value: Any) -> Any:
    """Return a value with the values of enum members, also in lists and dicts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_without_members(key): _without_members(each) for key, each in value.items()}
    return [*map(_without_members, value)] if isinstance(value, list | tuple) else value


def _processors(role: str) -> list[Any]:
    def with_role(_: Any, __: str, event: Any) -> Any:
        event["role"] = role
        # The renderer would print the repr of a member.
        return {key: _without_members(value) for key, value in event.items()}

    return [
        with_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "role", "event"]),
    ]
