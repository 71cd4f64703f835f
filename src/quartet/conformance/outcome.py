"""Endings of a check that has not passed, and what raises them."""

from __future__ import annotations

from typing import Any


class Violation(Exception):
    """The service does not do what the contract requires. The message says what it did, and what was expected."""


class Skipped(Exception):
    """The check does not apply to this service, or needs an option. The message says why."""


def expect(condition: object, message: str) -> None:
    """Raise Violation with ``message`` unless the condition holds."""
    if not condition:
        raise Violation(message)


def name_of(enum: Any, number: int) -> str:
    """Return the name of a value of a protobuf enum, or the number itself if it has none."""
    return str(enum.Name(number)) if number in enum.values() else str(number)
