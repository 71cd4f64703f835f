"""Comparison of mathematical answers with math-verify, in the process of ``quartet.verifiers.bounded``."""

from __future__ import annotations

import logging
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from quartet.verifiers.bounded import limit_memory

# It warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compare(answer: str, response: str, decimals: int) -> bool | None:
    r"""Return whether the final answer of ``response`` equals ``answer``; None if ``answer`` is no expression.

    Time limits are up to the caller.
    """
    limit_memory()
    expected = _parse(f"\\boxed{{{answer}}}") or _parse(answer)
    if not expected:
        return None
    given = _parse(response)
    return bool(given and math_verify.verify(expected, given, float_rounding=decimals, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in a text. Expressions in a box come first."""
    parsed: list[Any] = math_verify.parse(
        text,
        extraction_config=(LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed
