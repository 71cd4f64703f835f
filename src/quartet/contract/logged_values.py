"""Values that a reward source logs for each response: their limits, and their means. Standard library only."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "logged_"
"""Start of the names of their metrics."""
MAX_NAMES = 64
"""Maximum number of values for a response, and of metrics of a step."""
MAX_NAME = 64
"""Maximum length of a name."""
MAX_TEXT = 1000
"""Maximum length of a text, and of the JSON of a list or an object. Longer texts are cut, others are left out."""
MAX_NUMBER = 3.4e38
"""Largest number, so that sums have a value."""
_NAME = re.compile(rf"[A-Za-z0-9_]{{1,{MAX_NAME}}}")


def clean_name(name: object) -> str:
    """Return a name as that of a metric: ASCII letters, digits and "_", which replaces anything else; "" if it is none."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)[:MAX_NAME] if isinstance(name, str) else ""


def clean_value(value: Any) -> Any:
    """Return a JSON value as it is recorded: a finite number, a boolean, or a text. None if it is none of them."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if -MAX_NUMBER <= value <= MAX_NUMBER else None
    if isinstance(value, str):
        # Half of a character has no UTF-8.
        return value[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=True)
        return text if len(text) <= MAX_TEXT else None
    return None


def cleaned(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the first values that can be recorded, by clean name. Others are left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name, plain = clean_name(key), clean_value(value)
        if name and plain is not None and (name in result or len(result) < MAX_NAMES):
            result[name] = plain
    return result


def problem_of(values: Mapping[str, Any]) -> str | None:
    """Return why ``values`` of another process cannot be recorded, or None if they can."""
    if len(values) > MAX_NAMES:
        return f"{len(values)} values, expected at most {MAX_NAMES}"
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            return f"a name that is not 1 to {MAX_NAME} ASCII letters, digits and underscores"
        if value is None or isinstance(value, list | dict) or clean_value(value) != value:
            return f"{name} is not a finite number, a boolean or a text of at most {MAX_TEXT} characters"
    return None


def merged(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several sources logged for one response: the mean of numbers with the same name, else the first value."""
    by_name: defaultdict[str, list[Any]] = defaultdict(list)
    for values in sources:
        for name, value in values.items():
            by_name[name].append(value)
    names = list(by_name)[:MAX_NAMES]
    return {
        name: math.fsum(by_name[name]) / len(by_name[name])
        if len(by_name[name]) > 1 and all(isinstance(value, int | float) for value in by_name[name])
        else by_name[name][0]
        for name in names
    }


def means_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each logged number of a step over the responses that have it, as metrics by name."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                numbers[name].append(float(value))
    return {f"{PREFIX}{name}": math.fsum(numbers[name]) / len(numbers[name]) for name in sorted(numbers)[:MAX_NAMES]}
