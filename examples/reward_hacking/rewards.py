"""A reward function that a policy can exploit."""

from __future__ import annotations

from typing import Any


def detail(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return 0.1 per word. The intention is to reward detail, but arbitrary words earn the same."""
    return 0.1 * len(response.split())
