"""A home-made reward with a hole in it."""

from __future__ import annotations

from typing import Any


def detail(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Pays for detail, a tenth of a point for each word. It means well, but any words will do."""
    return 0.1 * len(response.split())
