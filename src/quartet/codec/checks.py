"""Range checks for the numbers of a request."""

from __future__ import annotations

from typing import Any

from quartet.config.section import MAX_SETTING
from quartet.errors import InvalidRequest

DIGEST_BYTES = 16
"""Size of a digest of weights."""


def checked_digest(digest: bytes, name: str, required: bool = False) -> bytes:
    """Return a digest of weights, which may be empty unless it is ``required``. Raises InvalidRequest."""
    if len(digest) != DIGEST_BYTES and (digest or required):
        raise InvalidRequest(f"{name}: expected {DIGEST_BYTES} bytes, got {len(digest)}")
    return digest


def positive(value: float, name: str) -> float:
    """Return the value if it is more than 0 and at most MAX_SETTING. Raises InvalidRequest."""
    if not 0 < value <= MAX_SETTING:
        raise InvalidRequest(f"{name} {value}: expected more than 0 and at most {MAX_SETTING:g}")
    return value


def require_non_negative(message: Any, *names: str) -> None:
    """Raise InvalidRequest unless each of these fields is in 0..MAX_SETTING."""
    for name in names:
        value = getattr(message, name)
        if not 0 <= value <= MAX_SETTING:
            raise InvalidRequest(f"{name} {value}: expected 0 to {MAX_SETTING:g}")
