"""Verifier of JSON by a schema."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.verifiers.errors import InvalidField, VerifierTimeout
from quartet.verifiers.json_schema import valid

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("response", ['{"a": 1}', ' {"a": 1, "b": []}\n', '```json\n{"a": 1}\n```'])
def test_json_that_the_schema_accepts_scores_1(response: str) -> None:
    assert valid("", response, {"schema": SCHEMA}) == 1.0
    assert valid("", response, {}, schema=SCHEMA) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        '{"a": "x"}',
        "{}",
        "",
        "a: 1",
        '{"a": 1} extra',
        '{"a": NaN}',
        "[" * 60000,
        '{"a": 1, "b": "' + "x" * 70000 + '"}',
    ],
)
def test_other_responses_score_0(response: str) -> None:
    assert valid("", response, {"schema": SCHEMA}) == 0.0


@pytest.mark.parametrize("response", ["1e400", "1" + "0" * 400, "-1e999", "1" + "0" * 5000])
@pytest.mark.parametrize("step", [0.01, 2, 0.5, 1e-300])
def test_a_number_that_is_too_large_to_check_scores_0(response: str, step: float) -> None:
    expected = float(response == "1" + "0" * 400 and step == 2)
    assert valid("", response, {}, schema={"multipleOf": step}) == expected


def test_a_number_of_the_schema_that_is_too_large_is_an_error() -> None:
    with pytest.raises(InvalidField, match="too large"):
        valid("", "0.5", {"schema": {"multipleOf": 10**400}})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"schema": 5},
        {"schema": {"type": "nothing"}},
        {"schema": {"$ref": "http://127.0.0.1:9/schema"}},
        {"schema": {"$ref": "#/missing"}},
    ],
)
def test_a_bad_schema_is_an_error_and_no_reference_is_fetched(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="schema"):
        valid("", "{}", fields)


def test_a_check_that_never_ends_is_a_timeout() -> None:
    with pytest.raises(VerifierTimeout):
        valid("", '"' + "a" * 60 + 'b"', {"schema": {"pattern": "(a+)+$"}}, seconds=0.5)
