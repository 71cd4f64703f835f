"""One table between domain errors and status codes: complete, unambiguous, and tight-lipped about the unforeseen."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from quartet import errors
from quartet.rpc.status_codes import CODES, INTERNAL_TEXT, code_of, error_of


def kinds(base: type[errors.QuartetError] = errors.QuartetError) -> Iterator[type[errors.QuartetError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == "quartet.errors":
            yield kind
            yield from kinds(kind)


def test_there_are_errors_to_speak_of() -> None:
    assert {errors.InvalidRequest, errors.MismatchError, errors.BufferFailed} <= set(kinds())


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_domain_error_has_a_row_of_its_own_or_of_its_family(kind: type[errors.QuartetError]) -> None:
    rows = [row for row, _ in CODES if issubclass(kind, row) and row is not errors.QuartetError]
    assert rows, f"{kind.__name__} falls through to the last row of CODES"
    code, text = code_of(kind("what was wrong"))
    assert code is dict(CODES)[rows[0]]
    assert text == "what was wrong"


def test_no_row_is_hidden_by_an_earlier_one() -> None:
    for place, (kind, _) in enumerate(CODES):
        assert not any(issubclass(kind, earlier) for earlier, _ in CODES[:place]), kind


@pytest.mark.parametrize("unforeseen", [RuntimeError("/secret/path"), KeyError("x"), ValueError("y")])
def test_an_unforeseen_error_keeps_its_text_inside(unforeseen: Exception) -> None:
    assert code_of(unforeseen) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (errors.InvalidRequest, errors.InvalidRequest),
        (errors.FailedPrecondition, errors.FailedPrecondition),
        # Only who cancels a call sees Cancelled; who did not, sees a service that gave up.
        (errors.Cancelled, errors.NoResponse),
        (errors.DeadlinePassed, errors.NoResponse),
        (errors.ServiceUnavailable, errors.ServiceUnavailable),
        (errors.ComputationFailed, errors.ComputationFailed),
        (errors.ServiceFailed, errors.ServiceFailed),
    ],
)
def test_what_a_service_raises_its_caller_raises_and_names_the_service(
    kind: type[errors.QuartetError], raised: type[errors.QuartetError]
) -> None:
    code, text = code_of(kind("the cause"))
    error = error_of(code, text, "critic at 127.0.0.1:1: Values", 3.0)
    assert type(error) is raised
    assert str(error).startswith("critic at 127.0.0.1:1: Values: ")
    assert kind is errors.DeadlinePassed or "the cause" in str(error)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_status_code_becomes_a_domain_error(code: grpc.StatusCode) -> None:
    error = error_of(code, "text", "reward at h:1: Score", 2.5)
    assert type(error) is not errors.QuartetError
    assert str(error).startswith("reward at h:1: Score: ")


def test_a_passed_deadline_names_the_seconds() -> None:
    error = error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "reward at h:1: Score", 2.5)
    assert isinstance(error, errors.ServiceFailed)
    assert (
        str(error)
        == "reward at h:1: Score: no answer within 2.5 s; raise its limit in the timeouts section if the work takes longer"
    )
