"""Text of prompts and responses in messages about a function's exceptions."""

from __future__ import annotations

import codecs
import json
import re

from quartet.rewards.function_worker_main import answer

PROMPT, RESPONSE = "My name is Ada and my PIN is", "4711"


def grades(prompt: str, response: str) -> float:
    raise ValueError(f"cannot grade {prompt} {response.upper()}")


def raised_message(arguments: list[str], quotes: bool = False) -> str:
    message: str = json.loads(answer(grades, 1, arguments, quotes))["raised"]
    return message


def test_the_text_of_an_exception_is_omitted_and_its_location_is_reported() -> None:
    expected = r"ValueError \(test_quotes\.py:\d+; the message is left out because it may quote a text\)"
    assert re.fullmatch(expected, raised_message([PROMPT, RESPONSE]))


def test_texts_are_quoted_on_request() -> None:
    assert raised_message([PROMPT, RESPONSE], quotes=True).startswith(f"ValueError: cannot grade {PROMPT} {RESPONSE}")


def test_the_text_of_an_exception_from_c_code_is_omitted() -> None:
    message = json.loads(answer(codecs.encode, 1, [PROMPT, RESPONSE]))["raised"]
    assert message.startswith("LookupError (")
    assert RESPONSE not in message


def test_wrong_arguments_are_reported_with_the_reason() -> None:
    assert raised_message([PROMPT]) == "TypeError: missing a required argument: 'response', called with 1 arguments"
