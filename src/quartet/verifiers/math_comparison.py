"""Comparison of mathematical answers with math-verify, in the process of ``quartet.verifiers.bounded``."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from quartet.verifiers.bounded import limit_cpu, limit_memory

# It warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


MAX_DEPTH = 20
"""Maximum depth of brackets in the box of a response."""
_TOO_LARGE = re.compile(
    r"\d{1000}"  # a long number
    r"|\d{5}\s*!|!\s*!"  # a factorial of a large number, or of a factorial
    r"|(?:\^|\*\*)[\s{(+-]*\d{7}"  # a large exponent
    r"|(?:(?:\^|\*\*)[\s{(+-]*\d+[\s})]*){3}"  # a tower of powers
)


def compare(answer: str, response: str, decimals: int, seconds: float) -> bool | None:
    r"""Return whether the final answer of ``response`` equals ``answer``; None if ``answer`` is no expression.

    A final answer in a box that is beyond the bounds differs. The process ends after ``seconds`` of CPU time.
    """
    limit_memory()
    limit_cpu(seconds)
    try:
        expected = _parse(f"\\boxed{{{answer}}}") or _parse(answer)
        if not expected:
            return None
        if _is_too_large(_last_box(response)):
            return False
        try:
            given = _parse(response)
            return bool(given and math_verify.verify(expected, given, float_rounding=decimals, timeout_seconds=None))
        except Exception:  # For example MemoryError or OverflowError of a large number.
            return False
    finally:
        limit_cpu(0)


def normal_form(response: str, decimals: int, seconds: float) -> str | None:
    """Return the final answer of ``response`` as a text that is the same for equal numbers; None if there is no answer.

    Numbers are rounded to ``decimals``. An answer that is beyond the bounds counts as none. The process ends after ``seconds`` of
    CPU time.
    """
    limit_memory()
    limit_cpu(seconds)
    try:
        if _is_too_large(_last_box(response)):
            return None
        try:
            parsed = _parse(response)
            return _normal_text(parsed[0], decimals) if parsed else None
        except Exception:  # For example MemoryError or OverflowError of a large number.
            return None
    finally:
        limit_cpu(0)


def _normal_text(answer: Any, decimals: int) -> str:
    if getattr(answer, "is_number", False):
        try:
            return str(round(Fraction(str(answer.doit().evalf(60))), decimals))
        except ValueError:  # For example a complex number.
            pass
    return str(answer)


def _last_box(text: str) -> str:
    r"""Return the content of the last \boxed{...}, up to the end if it is not closed. Empty without a box."""
    content = text.rpartition("\\boxed{")[2] if "\\boxed{" in text else ""
    depth = 1
    for place, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if not depth:
            return content[:place]
    return content


def _is_too_large(content: str) -> bool:
    """Return whether an answer would take too long: deep brackets, or large numbers, exponents and factorials."""
    depth = 0
    for character in content:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            return True
    return _TOO_LARGE.search(content) is not None


def _parse(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in a text. Expressions in a box come first."""
    parsed: list[Any] = math_verify.parse(
        text,
        extraction_config=(LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()),
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed
