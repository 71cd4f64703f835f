"""What every reward source offers, and the prompts' own fields as functions see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from quartet.errors import InvalidRequest
from quartet.types import Scores, ServiceStatus, TokenBatch


def never() -> bool:
    """Never cancelled."""
    return False


class RewardSource(Protocol):
    """Source of scores for finished responses. Accepts one call at a time."""

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """The batch's scores, in units of reward: finite float32 [sequences].

                ``fields``: of each sequence the prompt's own fields as a JSON object, or nothing at all. ``cancelled`` says when
        ``fields``: for each sequence a JSON object with the fields of its prompt line, or an empty list. ``cancelled`` returns
                true when the caller no longer waits. Raises InvalidRequest, ComputationFailed, Cancelled.
        """

    def status(self) -> ServiceStatus:
        """Status of the source for the reward service, without waiting. ``parameters`` is 0 if only functions score."""

    def close(self) -> None:
        """End the processes that it started. May be called again. A call in progress then fails."""


def parse_fields(fields: Sequence[str], sequences: int) -> list[dict[str, Any]]:
    """Each sequence's fields as an object [sequences]; empty ones where none are given. Raises InvalidRequest."""
    if not fields:
        return [{} for _ in range(sequences)]
    if len(fields) != sequences:
        raise InvalidRequest(f"fields: expected none, or one for each of the {sequences} sequences, got {len(fields)}")
    return [_parse_object(text, f"fields[{index}]") for index, text in enumerate(fields)]


def _parse_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # Of a JSON error only the place: its text is the prompt's.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidRequest(f"{name}: not JSON ({reason}), expected a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: found {type(value).__name__}, expected a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which are not JSON."""
    raise json.JSONDecodeError(f"{name} is no number", name, 0)
