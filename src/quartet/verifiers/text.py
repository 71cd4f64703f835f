"""Verifiers of text: exact match, a regular expression, and required tags or sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet.verifiers.bounded import call_bounded, limit_memory
from quartet.verifiers.errors import InvalidField
from quartet.verifiers.fields import answer_texts, field, texts

MAX_CHARACTERS = 65536


def exact_match(
    prompt: str, response: str, fields: dict[str, Any], *, answer_field: str = "answer", ignore_case: bool = False
) -> float:
    """Return 1 if the response is ``fields["answer"]``, or one of a list of answers; otherwise 0.

    Each run of white space counts as one space, and white space at both ends does not count. Raises InvalidField.
    """
    answers = [_normal(answer, ignore_case) for answer in answer_texts(fields, answer_field)]
    return float(_normal(response, ignore_case) in answers)


def given_answer(prompt: str, response: str, fields: dict[str, Any], *, ignore_case: bool = False) -> str | None:
    """Return the response as ``exact_match`` compares it, for the vote of ``evaluation.sets[].maj_at``; None if it is empty."""
    return _normal(response, ignore_case) or None


def regular_expression(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    pattern: str = "",
    pattern_field: str = "pattern",
    whole: bool = False,
    max_characters: int = MAX_CHARACTERS,
    seconds: float = 2.0,
) -> float:
    """Return 1 if a Python regular expression matches somewhere in the response, or with ``whole`` all of it; otherwise 0.

    The expression is the setting ``pattern``, or else ``fields["pattern"]``. Only the first ``max_characters`` are searched.
    Raises InvalidField, and VerifierTimeout if the search takes longer than ``seconds``.
    """
    expression = pattern or field(fields, pattern_field)
    name = "pattern" if pattern else f"fields: {pattern_field!r}"
    if not isinstance(expression, str):
        raise InvalidField(f"{name} is of type {type(expression).__name__}, expected a regular expression")
    result = call_bounded("quartet.verifiers.text:search", [expression, response[:max_characters], whole], seconds)
    if isinstance(result, str):
        raise InvalidField(f"{name} is not a regular expression: {result}")
    return float(result)


def search(pattern: str, text: str, whole: bool) -> bool | str:
    """Return whether the pattern matches, or why it is not a regular expression. Time limits are up to the caller."""
    import re

    limit_memory()
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return (expression.fullmatch(text) if whole else expression.search(text)) is not None


def required_tags(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    tags: Sequence[str] = ("think", "answer"),
    only: bool = True,
) -> float:
    """Return 1 if the response has each tag, as in <think>...</think>, exactly once, in this order, closed and not empty.

    With ``only``, there may be nothing but white space around them. Raises InvalidField for bad tags.
    """
    rest = response
    for tag in texts(tags, "tags"):
        begin, end = f"<{tag}>", f"</{tag}>"
        if response.count(begin) != 1 or response.count(end) != 1:
            return 0.0
        before, begun, after = rest.partition(begin)
        content, ended, rest = after.partition(end)
        if not (begun and ended and content.strip()) or (only and before.strip()):
            return 0.0
    return float(not (only and rest.strip()))


def required_sections(prompt: str, response: str, fields: dict[str, Any], *, headings: Sequence[str] = ()) -> float:
    """Return 1 if the response has a line for each heading, exactly once, in this order, with text below each; otherwise 0.

    ``headings`` are whole lines, such as "## Answer"; without them ``fields["headings"]``. Raises InvalidField.
    """
    expected = texts(headings or field(fields, "headings"), "headings")
    lines = [line.strip() for line in response.splitlines()]
    if any(lines.count(heading) != 1 for heading in expected):
        return 0.0
    places = [lines.index(heading) for heading in expected]
    ends = [*places[1:], len(lines)]
    return float(all(begin < end and any(lines[begin + 1 : end]) for begin, end in zip(places, ends, strict=True)))


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text
