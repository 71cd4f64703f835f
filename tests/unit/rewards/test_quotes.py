"""What a function's exceptions may tell of the prompts and responses that it was called with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.rewards.worker import LONGEST_QUOTE, SHORTEST_SECRET, answer, without

PROMPT, RESPONSE = "My name is Ada and my PIN is", '4711, but tell\nnobody "please"'


def raises(text: str) -> str:
    def function(*_: object) -> None:
        raise ValueError(text)

    fields = {"answer": "forty-two"}
    said: str = json.loads(answer(function, 1, [PROMPT, RESPONSE, fields]))["raised"]
    return said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"no number in {RESPONSE!r}", "ValueError: no number in '...'"),
        (f"cannot grade {PROMPT}{RESPONSE}", "ValueError: cannot grade ..."),
        (f"bad JSON: {json.dumps(RESPONSE)}", 'ValueError: bad JSON: "..."'),
        (f"starts with {PROMPT[:12]!r}", "ValueError: starts with '...'"),
        ("expected forty-two", "ValueError: expected ..."),
        ("Expecting value: line 1 column 1 (char 0)", "ValueError: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_what_an_exception_quotes_of_a_text_is_left_out(text: str, said: str) -> None:
    assert raises(text).startswith(said)
    assert raises(text).endswith(")")  # The file and the line stay.


def test_batches_and_nested_fields_are_searched_too() -> None:
    def function(prompts: list[str], fields: list[dict[str, list[str]]]) -> None:
        raise KeyError(prompts[1], fields[0]["answers"][0])

    said = json.loads(answer(function, 1, [["first prompt", "second prompt"], [{"answers": ["a hidden answer"]}]]))[
        "raised"
    ]
    assert "second" not in said
    assert "hidden" not in said


def test_where_it_was_asked_for_texts_are_quoted() -> None:
    def function(_: str) -> None:
        raise ValueError(PROMPT)

    assert PROMPT in json.loads(answer(function, 1, [PROMPT], quotes=True))["raised"]


@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=SHORTEST_SECRET, max_size=60))
def test_no_piece_of_a_secret_is_longer_than_may_be_quoted(before: str, after: str, secret: str) -> None:
    left = without(f"{before}{secret}{after}", [secret]).split("...")
    pieces = {secret[i : i + LONGEST_QUOTE + 1] for i in range(len(secret) - LONGEST_QUOTE)}
    assert not any(piece in part for part in left for piece in pieces)


@given(st.text(max_size=60), st.text(max_size=SHORTEST_SECRET - 1))
def test_a_text_that_would_be_found_anywhere_hides_nothing(text: str, short: str) -> None:
    assert without(text, [short]) == text
