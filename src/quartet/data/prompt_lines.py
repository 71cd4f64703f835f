"""Prompts as a prompts file holds them: text, messages or token ids. Errors name the line."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.data.prompt_files import iterate_rows, location
from quartet.errors import DataError

KEYS = ("prompt", "text", "messages", "token_ids")
"""Keys of a prompt. A row has exactly one of them."""
EXPECTED = (
    'expected "prompt" (a string or a list of messages), "text" (a string), "messages" (a list of objects with "role" and '
    '"content") or "token_ids" (a list of integers)'
)
MAX_FIELDS_BYTES = 1024 * 1024
"""Maximum size of a line's fields as JSON, including text and messages. Every scoring request contains them."""
MAX_MESSAGES = 1024
"""Maximum number of messages of a prompt."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: text or messages to be tokenized, or token ids.

    ``fields`` is the JSON object that reward functions get: all fields of the line except ``token_ids``, under the keys that
    they have in the file.
    """

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    fields: str = "{}"


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Return every prompt of a file. Raises DataError with file and line."""
    return list(iterate_prompt_lines(path))


def iterate_prompt_lines(path: Path) -> Iterator[PromptLine]:
    """Yield every prompt of a file, without reading the whole file. Raises DataError with file and line."""
    has_prompts = False
    for number, row in iterate_rows(path):
        has_prompts = True
        yield _parse(row, location(path, number), number)
    if not has_prompts:
        raise DataError(f"prompts {path}: empty; expected at least one prompt: {EXPECTED.removeprefix('expected ')}")


def prompt_of(content: object, where: str, number: int) -> PromptLine:
    """Return a prompt that is text or a list of messages, with number ``number``. Raises DataError that begins with ``where``."""
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise DataError(f"{where}: is of type {type(content).__name__}; expected a text or a list of messages")
    if isinstance(content, str):
        _check_encodable(content, where)
        return _parse({"text": content}, where, number)
    messages = [dict(message) if isinstance(message, Mapping) else message for message in content]
    for message in messages:
        for text in message.values() if isinstance(message, dict) else ():
            _check_encodable(text, where)
    return _parse({"messages": messages}, where, number)


def _check_encodable(text: object, where: str) -> None:
    try:
        if isinstance(text, str):
            text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: is not valid Unicode (it has half of a character); give text in UTF-8") from None


def _parse(value: dict[str, Any], where: str, number: int) -> PromptLine:
    given = {key: value.pop(key, None) for key in KEYS}
    # An empty cell of a CSV file is an empty string.
    kinds = [key for key, content in given.items() if content is not None and content != ""]
    if len(kinds) > 1:
        raise DataError(f"{where}: found {' and '.join(kinds)}; keep one of them, or rename the others; {EXPECTED}")
    if not kinds:
        empty = [key for key, content in given.items() if content == ""]
        keys = ", ".join(sorted(map(str, value))[:10]) or "nothing else"
        raise DataError(
            f"{where}: {empty[0]} is empty; {EXPECTED}"
            if empty
            else f"{where}: found none of prompt, text, messages and token_ids, but {keys}; {EXPECTED}"
        )
    kind = kinds[0]
    content = given[kind]
    if kind != "token_ids":
        value[kind] = content
    fields = _fields(value, where)
    if kind == "messages" or (kind == "prompt" and isinstance(content, list)):
        return PromptLine(number, messages=_messages(kind, content, where), fields=fields)
    if kind != "token_ids":
        if not isinstance(content, str):
            wanted = "a string or a list of messages" if kind == "prompt" else "a string"
            raise DataError(f"{where}: {kind} is not {wanted}; {EXPECTED}")
        return PromptLine(number, content, fields=fields)
    is_valid = isinstance(content, list) and all(type(token) is int and 0 <= token < 2**31 for token in content)
    if not is_valid or not content:
        raise DataError(f"{where}: token_ids is not a list of token ids; {EXPECTED}")
    return PromptLine(number, token_ids=tuple(content), fields=fields)


def _fields(value: dict[str, Any], where: str) -> str:
    """Return the fields for reward functions as compact JSON with sorted keys. Raises DataError."""
    try:
        fields = json.dumps(
            value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_as_json
        )
        size = len(fields.encode("utf-8"))
    except UnicodeEncodeError:
        raise DataError(f"{where}: contains half of a character (a lone surrogate); {EXPECTED}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be handed to a reward function ({error}); {EXPECTED}") from None
    if size > MAX_FIELDS_BYTES:
        raise DataError(
            f"{where}: {size} bytes of text and fields, expected at most {MAX_FIELDS_BYTES}; shorten them, "
            "or keep what is long in a file that your reward function reads"
        )
    return fields


def _as_json(value: Any) -> str:
    """Return a value of Parquet that JSON lacks as text."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise TypeError(f"a value is of type {type(value).__name__}, which JSON lacks; remove its column")


def _messages(key: str, value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key} is {'empty' if value == [] else 'not a list'}; {EXPECTED}")
    if len(value) > MAX_MESSAGES:
        raise DataError(f"{where}: {len(value)} messages, expected at most {MAX_MESSAGES}")
    for place, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: message {place} is not an object; {EXPECTED}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise DataError(f"{where}: message {place}: {name} is missing or not a string; {EXPECTED}")
        if not message["role"]:
            raise DataError(f"{where}: message {place}: role is empty; expected user, assistant, system, ...")
    return tuple(value)
