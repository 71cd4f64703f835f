"""Pagination: a cursor holds the position of the next page, and a digest of the request that it belongs to."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any

from quartet.gateway.http.http_errors import WrongField

Position = list[float | int | str]


def cursor_after(position: Position, request: Any) -> str:
    """Return an opaque cursor. ``request`` holds the filters and the order, which all pages of a list must share."""
    content = json.dumps([_digest(request), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def read_cursor(cursor: str, request: Any, kinds: tuple[type, ...]) -> Position:
    """Return the position of a cursor, with parts of the given types. Raises WrongField if it belongs to another request."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        content = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        digest, *parts = content
        position: Position = parts
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise _invalid_cursor() from None
    valid = len(position) == len(kinds) and all(type(part) is kind for part, kind in zip(position, kinds, strict=True))
    if (
        not valid
        or any(isinstance(part, int) and abs(part) >= 2**62 for part in position)
        or digest != _digest(request)
    ):
        raise _invalid_cursor()
    return position


def _invalid_cursor() -> WrongField:
    return WrongField(
        "query.cursor", "belongs to another list; use `next` of the previous page, with the same filters and order"
    )


def _digest(request: Any) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
