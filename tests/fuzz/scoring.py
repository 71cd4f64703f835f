"""The reward function of the fuzzed reward service: it looks at the prompt's own fields, as users' functions do."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """1 where the answer is in the response. Fails where the field is not what it expects, as users' functions do."""
    return float(fields.get("answer", "") in response)
