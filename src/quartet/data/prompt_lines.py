"""Read prompts from a JSON Lines file line by line. Errors name the line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from quartet.errors import DataError

EXPECTED = (
    'expected a JSON object with "text" (a string), "messages" (a list of objects with "role" and "content") '
    'or "token_ids" (a list of integers)'
)
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Maximum length of a line."""
MAX_FIELDS_BYTES = 1024 * 1024
"""Maximum size of a line's fields as JSON, including text and messages. Every scoring request contains them."""
MAX_MESSAGES = 1024
"""Maximum number of messages of a prompt."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: text or messages to be tokenized, or token ids.

    ``fields`` is the JSON object that reward functions get: all fields of the line except ``token_ids``.
    """

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    fields: str = "{}"


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Return every prompt of a JSON Lines file. Blank lines are skipped. Raises DataError with file and line."""
    return list(iterate_prompt_lines(path))


def iterate_prompt_lines(path: Path) -> Iterator[PromptLine]:
    """Yield every prompt of a JSON Lines file, without reading the whole file. Raises DataError with file and line."""
    has_prompts = False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(_bounded_lines(file, path), 1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
                if raw.strip():
                    has_prompts = True
                    yield _parse(raw, f"prompts {path}:{number}", number)
    except OSError as error:
        raise DataError(
            f"prompts {path}: cannot be read ({error.strerror}); give a JSON Lines file (data.prompts, --file)"
        ) from None
    if not has_prompts:
        raise DataError(
            f"prompts {path}: empty; expected at least one prompt, {EXPECTED.removeprefix('expected ')} a line"
        )


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(f"prompts {path}:{number}: longer than {MAX_LINE_BYTES} bytes; {EXPECTED}")
        yield raw


def _parse(raw: bytes, where: str, number: int) -> PromptLine:
    try:
        value: Any = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}; {EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); {EXPECTED}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}; {EXPECTED}")
    text, messages, token_ids = (value.pop(key, None) for key in ("text", "messages", "token_ids"))
    given = {"text": text, "messages": messages, "token_ids": token_ids}
    kinds = [key for key, content in given.items() if content is not None]
    if len(kinds) != 1:
        raise DataError(f"{where}: found {' and '.join(kinds) or 'none'} of text, messages and token_ids; {EXPECTED}")
    kind = kinds[0]
    if kind != "token_ids":
        value[kind] = given[kind]
    fields = _fields(value, where)
    if kind == "text":
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: text is {'empty' if text == '' else 'not a string'}; {EXPECTED}")
        return PromptLine(number, text, fields=fields)
    if kind == "messages":
        return PromptLine(number, messages=_messages(messages, where), fields=fields)
    is_valid = isinstance(token_ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in token_ids)
    if not is_valid or not token_ids:
        raise DataError(f"{where}: token_ids is not a list of token ids; {EXPECTED}")
    return PromptLine(number, token_ids=tuple(token_ids), fields=fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _fields(value: dict[str, Any], where: str) -> str:
    """Return the fields for reward functions as compact JSON with sorted keys. Raises DataError."""
    try:
        fields = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        size = len(fields.encode("utf-8"))
    except UnicodeEncodeError:
        raise DataError(f"{where}: contains half of a character (a lone surrogate); {EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be handed to a reward function ({error}); {EXPECTED}") from None
    if size > MAX_FIELDS_BYTES:
        raise DataError(
            f"{where}: {size} bytes of text and fields, expected at most {MAX_FIELDS_BYTES}; shorten them, "
            "or keep what is long in a file that your reward function reads"
        )
    return fields


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages is {'empty' if value == [] else 'not a list'}; {EXPECTED}")
    if len(value) > MAX_MESSAGES:
        raise DataError(f"{where}: {len(value)} messages, expected at most {MAX_MESSAGES}")
    for place, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: message {place} is not an object; {EXPECTED}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"{where}: message {place}: {key} is missing or not a string; {EXPECTED}")
        if not message["role"]:
            raise DataError(f"{where}: message {place}: role is empty; expected user, assistant, system, ...")
    return tuple(value)
