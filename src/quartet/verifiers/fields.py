"""Fields of a prompt's line, as verifiers read them. A wrong field is an error, because it says nothing about the response."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from quartet.verifiers.errors import InvalidField


def field(fields: dict[str, Any], name: str) -> Any:
    """Return a field. Raises InvalidField if it is missing or null."""
    value = fields.get(name)
    if value is None:
        others = ", ".join(sorted(fields)[:10]) or "none"
        raise InvalidField(
            f"fields: {name!r} is missing, found {others}; add it to the prompt's line, or name another field"
        )
    return value


def answer_text(fields: dict[str, Any], name: str) -> str:
    """Return a field with text or a number as text, numbers without exponent. Raises InvalidField."""
    value = field(fields, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format(Decimal(repr(value)), "f")
    if not isinstance(value, str) or not value.strip():
        raise InvalidField(f"fields: {name!r} is {_kind(value)}, expected a text that is not empty, or a number")
    return value


def answer_texts(fields: dict[str, Any], name: str) -> list[str]:
    """Return a field with one answer or a list of answers as texts. Raises InvalidField."""
    value = field(fields, name)
    if not isinstance(value, list):
        return [answer_text(fields, name)]
    if not value:
        raise InvalidField(f"fields: {name!r} is an empty list, expected at least one answer")
    return [answer_text({f"{name}[{index}]": each}, f"{name}[{index}]") for index, each in enumerate(value)]


def texts(value: object, name: str) -> tuple[str, ...]:
    """Return a list of texts that are not empty. ``name`` is for the message. Raises InvalidField."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidField(f"{name}: is {_kind(value)}, expected a list of texts")
    if not all(isinstance(each, str) and each for each in value):
        raise InvalidField(f"{name}: has an entry that is not a text or is empty, expected a list of texts")
    return tuple(value)


def _kind(value: object) -> str:
    if value in ("", []):
        return "empty"
    return f"of type {type(value).__name__}"
