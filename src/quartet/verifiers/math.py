"""Verifier of mathematical answers: ``quartet.verifiers.math:final_answer``. Needs the extra `verifiers` (math-verify).

``given_answer`` returns the answer that it finds, for the vote of ``evaluation.sets[].maj_at``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from quartet.system.missing_packages import require_package
from quartet.verifiers.bounded import call_bounded
from quartet.verifiers.errors import ComputationTooLarge, InvalidField
from quartet.verifiers.fields import answer_text

require_package("math_verify", "verifiers")
WALL_FACTOR = 10.0
"""Wall time of a comparison per second of its CPU time."""


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
    the last ``max_characters`` of the response are read. A response that needs more than ``seconds`` of CPU time, or that is
    beyond the bounds of ``math_comparison``, scores 0. Raises InvalidField; ComputationTooLarge if the answer itself takes too
    long; VerifierTimeout if the machine is too busy.
    """
    answer = answer_text(fields, answer_field)
    result = _compare(answer, response[-max_characters:], decimals, seconds)
    if result is None:
        raise InvalidField(f"fields: {answer_field!r} is neither a number nor an expression in LaTeX")
    return float(result)


def given_answer(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    max_characters: int = 4096,
    seconds: float = 5.0,
    decimals: int = 6,
) -> str | None:
    """Return the final answer of a response, as ``final_answer`` finds it, or None. Numbers that it takes as equal have one text.

    A response that needs more than ``seconds`` of CPU time has no answer. Raises VerifierTimeout if the machine is too busy.
    """
    arguments = [response[-max_characters:], decimals, seconds]
    try:
        answer: str | None = call_bounded(
            "quartet.verifiers.math_comparison:normal_form", arguments, WALL_FACTOR * seconds
        )
    except ComputationTooLarge:
        return None
    return answer


def _compare(answer: str, response: str, decimals: int, seconds: float) -> bool | None:
    """Return the result of ``math_comparison.compare``. Raises ComputationTooLarge if the answer is too large for it."""
    try:
        return _compare_once(answer, response, decimals, seconds)
    except ComputationTooLarge:
        # The response is at fault, unless the comparison of the answer with a small number is too large, too.
        return False if _is_expression(answer, decimals, seconds) else None


@lru_cache(maxsize=1024)
def _is_expression(answer: str, decimals: int, seconds: float) -> bool:
    """Return whether an answer can be read and compared. Raises ComputationTooLarge."""
    return _compare_once(answer, "0", decimals, seconds) is not None


def _compare_once(answer: str, response: str, decimals: int, seconds: float) -> bool | None:
    result: bool | None = call_bounded(
        "quartet.verifiers.math_comparison:compare", [answer, response, decimals, seconds], WALL_FACTOR * seconds
    )
    return result
