"""Text of prompts and responses in messages about a function's exceptions."""

from __future__ import annotations

import codecs
import json
import re

from quartet.rewards.function_worker_main import answer

PROMPT, RESPONSE = "My name is Ada and my PIN is", "4711"


def grades(prompt: str, response: str) -> float:
    raise ValueError(f"cannot grade {prompt} {response.upper()}")


def raised(arguments: list[str], quotes: bool = False) -> str:
    said: str = json.loads(answer(grades, 1, arguments, quotes))["raised"]
    return said


def test_what_an_exception_says_is_left_out_and_its_place_is_told() -> None:
    expected = r"ValueError \(test_quotes\.py:\d+; the message is left out because it may quote a text\)"
    assert re.fullmatch(expected, raised([PROMPT, RESPONSE]))


def test_where_it_was_asked_for_texts_are_quoted() -> None:
    assert raised([PROMPT, RESPONSE], quotes=True).startswith(f"ValueError: cannot grade {PROMPT} {RESPONSE}")


def test_what_is_raised_by_no_line_of_python_is_left_out_too() -> None:
    said = json.loads(answer(codecs.encode, 1, [PROMPT, RESPONSE]))["raised"]
    assert said.startswith("LookupError (")
    assert RESPONSE not in said


def test_a_function_that_cannot_be_called_so_is_told_why() -> None:
    assert raised([PROMPT]) == "TypeError: missing a required argument: 'response', called with 1 arguments"
