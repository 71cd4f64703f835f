"""Outcomes of responses, with the causes of failures."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.contract.trajectory import Outcome
from quartet.errors import InvalidRequest
from quartet.v1 import trajectory_pb2

MAX_DETAIL_CHARACTERS = 1024
"""Maximum length of a detail. Longer ones are cut."""

_NUMBERS = {
    Outcome.OK: trajectory_pb2.OUTCOME_OK,
    Outcome.TIMEOUT: trajectory_pb2.OUTCOME_TIMEOUT,
    Outcome.SCORER_ERROR: trajectory_pb2.OUTCOME_SCORER_ERROR,
    Outcome.SANDBOX_ERROR: trajectory_pb2.OUTCOME_SANDBOX_ERROR,
    Outcome.ENVIRONMENT_ERROR: trajectory_pb2.OUTCOME_ENVIRONMENT_ERROR,
    Outcome.CANCELLED: trajectory_pb2.OUTCOME_CANCELLED,
    Outcome.REFUSED: trajectory_pb2.OUTCOME_REFUSED,
}
_OUTCOMES = {number: outcome for outcome, number in _NUMBERS.items()}


def outcome_to_proto(outcome: Outcome) -> trajectory_pb2.Outcome.ValueType:
    """Convert an outcome."""
    return _NUMBERS[outcome]


def outcome_from_proto(number: int, name: str) -> Outcome:
    """Convert the outcome in the field ``name``. Raises InvalidRequest."""
    outcome = _OUTCOMES.get(number)  # type: ignore[call-overload]
    if outcome is None:
        raise InvalidRequest(f"{name}: {number} is not an outcome; expected 1 to {len(_OUTCOMES)}")
    return outcome  # type: ignore[no-any-return]


def details_to_proto(details: Sequence[str]) -> list[str]:
    """Return the causes of failures in the length that a message may have."""
    return [detail[:MAX_DETAIL_CHARACTERS] for detail in details]


def details_from_proto(details: Sequence[str]) -> tuple[str, ...]:
    """Return the causes of failures as printable lines of limited length."""
    return tuple(
        "".join(each if each.isprintable() else " " for each in detail[:MAX_DETAIL_CHARACTERS]) for detail in details
    )
