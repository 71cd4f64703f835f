"""Reward function of the fuzzed reward service. It reads the fields of the prompt, as users' functions do."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return 1 if the answer is in the response. Fails if the field has another type, as users' functions do."""
    return float(fields.get("answer", "") in response)
