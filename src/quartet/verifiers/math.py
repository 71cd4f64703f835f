"""Verifier of mathematical answers: ``quartet.verifiers.math:final_answer``. Needs the extra `verifiers` (math-verify)."""

from __future__ import annotations

from typing import Any

from quartet.verifiers.bounded import call_bounded
from quartet.verifiers.errors import InvalidField
from quartet.verifiers.extra_packages import require
from quartet.verifiers.fields import answer_text

require("math_verify")


def final_answer(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    answer_field: str = "answer",
    max_characters: int = 4096,
    seconds: float = 5.0,
    decimals: int = 6,
) -> float:
    r"""Return 1 if the response's final answer equals ``fields["answer"]``, a number or an expression in LaTeX; otherwise 0.

    The final answer is in \boxed{...}, else it follows "answer is", else it is the last number. Boxes side by side are one answer
    with several values. 1/2, 0.5, 50% and \frac{1}{2} are equal. Numbers are compared after rounding to ``decimals``. Only
    the last ``max_characters`` of the response are read. Raises InvalidField, and VerifierTimeout if a comparison takes
    longer than ``seconds``.
    """
    answer = answer_text(fields, answer_field)
    result = call_bounded(
        "quartet.verifiers.math_comparison:compare", [answer, response[-max_characters:], decimals], seconds
    )
    if result is None:
        raise InvalidField(f"fields: {answer_field!r} is neither a number nor an expression in LaTeX")
    return float(result)
