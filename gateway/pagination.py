"""Pages: a cursor says after which item the next one begins, and to which question it belongs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any

from quartet.gateway.http_errors import WrongField

Position = list[float | int | str]


def cursor_after(position: Position, question: Any) -> str:
    """Opaque to the caller. ``question`` is what was asked for, filters and order: all that pages must agree in."""
    content = json.dumps([_digest(question), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def read_cursor(cursor: str, question: Any, kinds: tuple[type, ...]) -> Position:
    """The position of a cursor, its parts of the given types. Raises WrongField unless it is of this question."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        content = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        digest, *parts = content
        position: Position = parts
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise _wrong() from None
    fits = len(position) == len(kinds) and all(type(part) is kind for part, kind in zip(position, kinds, strict=True))
    if (
        not fits
        or any(isinstance(part, int) and abs(part) >= 2**62 for part in position)
        or digest != _digest(question)
    ):
        raise _wrong()
    return position


def _wrong() -> WrongField:
    return WrongField(
        "query.cursor", "is not of this list; give `next` of the page before, with the same filters and order"
    )


def _digest(question: Any) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:12]
