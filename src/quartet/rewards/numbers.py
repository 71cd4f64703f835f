"""Strict reading of scores: a value that is not a finite number is an error, never a score."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from quartet.rewards.reward_source import LARGEST


def is_score(value: Any) -> bool:
    """Return whether a value is a finite number in the range of float32. A boolean is not a score, although
    Python calls it an int."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def shown(value: Any) -> str:
    """Describe a value without quoting text, which may come from a prompt or response."""
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "an integer beyond float32"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}, beyond float32" if abs(value) > LARGEST else f"{value:g}"
    return repr(value)


def strict_json(content: bytes | str) -> Any:
    """Return the JSON value of a message. Raises ValueError with a reason that does not quote the message."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError("not JSON (not UTF-8)") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON (too deep, or a number too long)") from None


def _refuse(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not a number", name, 0)
