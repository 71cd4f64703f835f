"""What the numbers of a request may be."""

from __future__ import annotations

from typing import Any

from quartet.errors import InvalidRequest

LARGEST = 1e30
"""Largest setting that a request may hold: what is computed in single precision ends at 3e38."""


def positive(value: float, name: str) -> float:
    """The value, when more than 0 and at most LARGEST. Raises InvalidRequest."""
    if not 0 < value <= LARGEST:
        raise InvalidRequest(f"{name} {value}: expected more than 0 and at most {LARGEST:g}")
    return value


def require_non_negative(message: Any, *names: str) -> None:
    """Raises InvalidRequest unless each of these fields is 0 to LARGEST."""
    for name in names:
        value = getattr(message, name)
        if not 0 <= value <= LARGEST:
            raise InvalidRequest(f"{name} {value}: expected 0 to {LARGEST:g}")
