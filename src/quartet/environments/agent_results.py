"""Results of agents: what a command prints, a service responds or a function returns. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any

from quartet.contract.logged_values import cleaned

RESULT_KEYS = ("reward", "logged", "outcome", "detail")
"""Keys of a result that is an object."""
OUTCOMES = ("timeout", "scorer_error", "sandbox_error", "environment_error", "cancelled", "refused")
"""Outcomes that an agent may name. A test compares them with ``Outcome``."""
EXPECTED = "expected a number, an object with reward, logged, outcome or detail, or nothing"
_LARGEST = 3.4028234663852886e38
"""Maximum of float32."""

Result = dict[str, Any]
"""``reward``, ``outcome``, ``detail`` and ``logged``, each only if it is not that of a run without one."""


class Unusable(Exception):
    """A result that is none. The text quotes nothing of it."""


def failed(detail: str, outcome: str = "environment_error") -> Result:
    """Return the result of an agent that failed."""
    return {"outcome": outcome, "detail": detail}


def result_of(value: Any) -> Result:
    """Return the result in a JSON value. Raises Unusable."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {"reward": _number(value)}
    if unknown := [str(key) for key in value if key not in RESULT_KEYS]:
        # The names are those of the agent's author, and not of the policy.
        raise Unusable(f"has the key {unknown[0][:64]!r}, {EXPECTED}")
    result: Result = {}
    if (logged := value.get("logged")) is not None:
        if not isinstance(logged, dict):
            raise Unusable(f"has logged that is a {type(logged).__name__}, expected an object")
        result["logged"] = cleaned(logged)
    if (outcome := value.get("outcome", "ok")) != "ok":
        if outcome not in OUTCOMES:
            raise Unusable(f"has an unknown outcome, expected ok or one of {', '.join(OUTCOMES)}")
        return result | failed(str(value.get("detail") or f"the agent ended with outcome {outcome}"), outcome)
    if value.get("reward") is not None:
        result["reward"] = _number(value["reward"])
    return result


def result_of_line(line: str) -> Result:
    """Return the result in the last line that a command printed: an object, a number, or nothing. Raises Unusable.

    Any other text is no result, such as the last line of a log.
    """
    text = line.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if text.startswith("{"):
            raise Unusable("starts with { and is no JSON object; print the result as one line of JSON") from None
        return {}
    is_result = isinstance(value, dict) or (isinstance(value, int | float) and not isinstance(value, bool))
    return result_of(value) if is_result else {}


def _number(value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()  # A number of NumPy or torch.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"is or has as reward a value of type {type(value).__name__}, {EXPECTED}")
    if not math.isfinite(value) or not -_LARGEST <= value <= _LARGEST:
        raise Unusable("has a reward that is not a finite number of single precision")
    return float(value)
