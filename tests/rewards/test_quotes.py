"""Text of prompts and responses in messages about a function's exceptions."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable

from quartet.system.user_function_child import answer

PROMPT, RESPONSE = "My name is Ada and my PIN is", "4711"


def grades(prompt: str, response: str) -> float:
    raise ValueError(f"cannot grade {prompt} {response.upper()}")


def decodes(prompt: str, response: str) -> object:
    return json.loads(prompt)


LINE = grades.__code__.co_firstlineno + 1


def raised(function: Callable[..., object], arguments: list[str], quotes: bool = False) -> dict[str, str | None]:
    result: dict[str, str | None] = json.loads(answer(function, {"number": 1, "arguments": arguments}, quotes))
    return result


def test_the_text_of_an_exception_is_omitted_and_its_location_is_reported() -> None:
    result = raised(grades, [PROMPT, RESPONSE])
    assert (result["raised"], result["text"]) == ("ValueError", None)
    assert result["location"] == f"test_quotes.py:{LINE}"


class Unquoting(Exception):
    quotes_texts = False


def misses_a_field(prompt: str, response: str) -> float:
    raise Unquoting("the field answer is missing")


def test_the_text_of_an_exception_that_quotes_nothing_is_reported() -> None:
    assert raised(misses_a_field, [PROMPT, RESPONSE])["text"] == "the field answer is missing"


def test_texts_are_quoted_on_request() -> None:
    assert raised(grades, [PROMPT, RESPONSE], quotes=True)["text"] == f"cannot grade {PROMPT} {RESPONSE}"


def test_the_location_is_in_the_users_code_even_if_a_library_raised() -> None:
    result = raised(decodes, [PROMPT, RESPONSE])
    assert (result["raised"], result["location"]) == ("JSONDecodeError", f"test_quotes.py:{LINE + 4}")


def test_the_text_of_an_exception_from_c_code_is_omitted() -> None:
    result = raised(codecs.encode, [PROMPT, RESPONSE])
    assert (result["raised"], result["text"]) == ("LookupError", None)


def test_wrong_arguments_are_reported_with_the_reason() -> None:
    result = raised(grades, [PROMPT])
    assert result["raised"] == "TypeError"
    assert result["text"] == "missing a required argument: 'response', called with 1 argument"
