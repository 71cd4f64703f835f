"""The interface of reward sources, and the fields of prompt lines as reward functions get them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np

from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import InvalidRequest

LARGEST = float(np.finfo(np.float32).max)
"""Largest score."""


def never() -> bool:
    """Return False: default for ``cancelled``."""
    return False


class RewardSource(Protocol):
    """Source of scores for finished responses. Accepts one call at a time."""

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the batch's scores, in units of reward: float32 [sequences], NaN where the outcome is not ok.

        ``fields``: for each sequence a JSON object with the fields of its prompt line, or an empty list. ``cancelled`` returns
        True once the caller no longer waits. A failure for one sequence is its outcome and does not fail the batch. Raises
        InvalidRequest, Cancelled; ComputationFailed or ServiceFailed if the failure concerns the whole batch.
        """

    def status(self) -> ServiceStatus:
        """Return the status for the reward service, without waiting. ``parameters`` is 0 if only functions score."""

    def close(self) -> None:
        """End the processes that the source started. A call in progress fails. May be called again."""


Value = TypeVar("Value")


@runtime_checkable
class DivisibleSource(Protocol):
    """A reward source whose work on a batch can be interrupted."""

    def score_in_units(
        self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never
    ) -> Generator[None, None, Scores]:
        """Compute the scores of ``RewardSource.score``, with the same bits. Yields between two units of work."""


def score_in_units(
    source: RewardSource, batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool] = never
) -> Generator[None, None, Scores]:
    """Return the scores of a source in units of work. A source that cannot be interrupted has one unit."""
    if isinstance(source, DivisibleSource):
        return (yield from source.score_in_units(batch, fields, cancelled))
    return source.score(batch, fields, cancelled)


def completed(units: Generator[None, None, Value]) -> Value:
    """Return the result of a computation in units, without a pause."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            result: Value = end.value
            return result


class Score(float):
    """A score, with what its source logged beside it."""

    logged: Mapping[str, Any]

    def __new__(cls, value: Any, logged: Mapping[str, Any]) -> Score:
        score = super().__new__(cls, value)
        score.logged = logged
        return score


Result = float | tuple[Outcome, str]
"""Result of one sequence: its score, or the outcome of a failure with its cause."""


def scores_of(results: Sequence[Result]) -> Scores:
    """Return the scores of a batch. A number beyond float32 is a scorer error."""
    checked = [_in_range(result) for result in results]
    total = np.array([result if isinstance(result, float) else np.nan for result in checked], np.float32)
    logged = tuple(result.logged if isinstance(result, Score) else {} for result in checked)
    logged = logged if any(logged) else ()
    if all(isinstance(result, float) for result in checked):
        return Scores(total, logged=logged)
    return Scores(
        total,
        logged=logged,
        outcomes=tuple(Outcome.OK if isinstance(result, float) else result[0] for result in checked),
        details=tuple("" if isinstance(result, float) else result[1] for result in checked),
    )


def _in_range(result: Result) -> Result:
    if not isinstance(result, float) or -LARGEST <= result <= LARGEST:
        return result
    return Outcome.SCORER_ERROR, f"the score {result:g} is beyond float32"


def parse_fields(fields: Sequence[str], sequences: int) -> list[dict[str, Any]]:
    """Parse the fields of each sequence, [sequences]. Return empty objects if ``fields`` is empty. Raises InvalidRequest."""
    if not fields:
        return [{} for _ in range(sequences)]
    if len(fields) != sequences:
        raise InvalidRequest(f"fields: expected none, or one for each of the {sequences} sequences, got {len(fields)}")
    return [_parse_object(text, f"fields[{index}]") for index, text in enumerate(fields)]


def _parse_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # Only the message of a JSON error, because its text may quote the prompt.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidRequest(f"{name}: not JSON ({reason}), expected a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: found {type(value).__name__}, expected a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Raise JSONDecodeError for NaN and Infinity, which Python reads but JSON does not allow."""
    raise json.JSONDecodeError(f"{name} is not a number", name, 0)


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
