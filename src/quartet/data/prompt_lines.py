"""Prompts as a prompts file holds them: text, messages or token ids. Errors name the line."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.config.prompt_sets import PROMPT_KEYS, SET_FIELD, placeholders
from quartet.data.chat_template import NO_INPUTS, Message, TemplateInputs, content_problem
from quartet.data.prompt_files import JSON_COLUMNS, iterate_rows, location
from quartet.data.prompt_settings import PromptSettings, RowMapping
from quartet.errors import DataError

EXPECTED = (
    'expected "prompt" (a string or a list of messages), "text" (a string), "messages" (a list of objects with "role" and '
    '"content") or "token_ids" (a list of integers)'
)
MAX_FIELDS_BYTES = 1024 * 1024
"""Maximum size of a line's fields as JSON, including text and messages. Every scoring request contains them."""
MAX_MESSAGES = 1024
"""Maximum number of messages of a prompt."""
PLAIN = RowMapping()
"""The mapping of a file whose columns are used as they are."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: text or messages to be tokenized, or token ids.

    ``fields`` is the JSON object that reward functions get: all fields of the line except ``token_ids``, under the keys that
    they have in the file. ``key`` is the key of the prompt. ``inputs`` are what the chat template gets besides the messages.
    """

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    fields: str = "{}"
    key: str = field(default="prompt", compare=False)
    inputs: TemplateInputs = NO_INPUTS


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Return every prompt of a file. Raises DataError with file and line."""
    return list(iterate_prompt_lines(path))


def iterate_prompt_lines(path: Path) -> Iterator[PromptLine]:
    """Yield every prompt of a file, without reading the whole file. Raises DataError with file and line."""
    return _lines(iterate_rows(path), PLAIN, str(path), lambda number: location(path, number))


def iterate_prompts(settings: PromptSettings, path: Path) -> Iterator[PromptLine]:
    """Yield every prompt of a set, whose rows are in the file ``path``. Raises DataError with row and column."""
    mapping = settings.mapping
    rows = iterate_rows(path, {mapping.column(name) for name in JSON_COLUMNS})
    return _lines(islice(rows, mapping.take), mapping, str(settings), settings.location)


def _lines(
    rows: Iterable[tuple[int, dict[str, Any]]], mapping: RowMapping, title: str, locate: Callable[[int], str]
) -> Iterator[PromptLine]:
    has_prompts = False
    for number, row in rows:
        has_prompts = True
        where = locate(number)
        yield _parse(_mapped(row, mapping, where), where, number, mapping)
    if not has_prompts:
        raise DataError(f"prompts {title}: empty; expected at least one prompt: {EXPECTED.removeprefix('expected ')}")


def _mapped(row: dict[str, Any], mapping: RowMapping, where: str) -> dict[str, Any]:
    """Return a row with the names of the mapping, its templates filled in, and the name of its set. Raises DataError."""
    if mapping == PLAIN:
        return row
    renamed = {}
    for name, column in mapping.columns:
        if column not in row:
            raise DataError(f"{where}: has no column {column}, but {_names(row)}; correct columns.{name}")
        renamed[name] = row[column]
    unread = {*mapping.ignored, *(column for _, column in mapping.columns)}
    value = {name: content for name, content in row.items() if name not in unread}
    added = {SET_FIELD: mapping.set_name} if mapping.set_name else {}
    if repeated := sorted(value.keys() & (renamed.keys() | added.keys())):
        raise DataError(
            f"{where}: has a column {repeated[0]}, and another value gets this name; add it to ignore_columns, or rename it "
            "in columns"
        )
    return {**value, **renamed, **added}


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))[:10]) or "nothing else"


def _filled(template: str, row: Mapping[str, Any], mapping: RowMapping, where: str) -> str:
    """Return a template with the values of a row. Raises DataError."""
    values = {}
    for name in placeholders(template):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = "null" if value is None else f"of type {type(value).__name__}"
            kind = kind if name in row else "missing"
            raise DataError(
                f"{where}: {mapping.label(name)} is {kind}, but the template needs it; expected a text or a number; the row has "
                f"{_names(row)}"
            )
        values[name] = value
    return template.format(**values)


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


def _parse(value: dict[str, Any], where: str, number: int, mapping: RowMapping = PLAIN) -> PromptLine:
    if mapping.text is not None or mapping.messages:
        return _from_template(value, where, number, mapping)
    given = {key: value[key] for key in PROMPT_KEYS if key in value}
    # An empty cell of a CSV file is an empty string.
    kinds = [key for key, content in given.items() if content is not None and content != ""]
    if len(kinds) > 1:
        raise DataError(f"{where}: found {' and '.join(kinds)}; keep one of them, or rename the others; {EXPECTED}")
    if not kinds:
        if given:
            key, content = next(iter(given.items()))
            problem = "null" if content is None else "empty"
            raise DataError(f"{where}: {mapping.label(key)} is {problem}; {EXPECTED}; or remove the row")
        raise DataError(f"{where}: found none of prompt, text, messages and token_ids, but {_names(value)}; {EXPECTED}")
    kind = kinds[0]
    content, label = given[kind], mapping.label(kind)
    fields = _fields({name: cell for name, cell in value.items() if name != "token_ids"}, where)
    if kind == "messages" or (kind == "prompt" and isinstance(content, list)):
        messages = _messages(label, content, where)
        return PromptLine(number, messages=messages, fields=fields, key=kind, inputs=_inputs(value, where, mapping))
    if kind != "token_ids":
        if not isinstance(content, str):
            wanted = "a string or a list of messages" if kind == "prompt" else "a string"
            raise DataError(f"{where}: {label} is not {wanted}, but {_shown(content)}; {EXPECTED}")
        return PromptLine(number, content, fields=fields, key=kind)
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}: {label} is not a list of token ids, but {_shown(content)}; {EXPECTED}")
    for place, token in enumerate(content, 1):
        if type(token) is not int or not 0 <= token < 2**31:
            raise DataError(
                f"{where}: {label} is not a list of token ids: entry {place} is {_shown(token)}; expected whole numbers from 0 "
                f"to {2**31 - 1}"
            )
    return PromptLine(number, token_ids=tuple(content), fields=fields, key=kind)


def _from_template(value: dict[str, Any], where: str, number: int, mapping: RowMapping) -> PromptLine:
    """Return the prompt that a template makes. The fields are all columns and the prompt."""
    text, messages = None, None
    if mapping.text is not None:
        text = _filled(mapping.text, value, mapping, where)
        if not text:
            raise DataError(f"{where}: the template makes an empty text of it; remove the row")
    else:
        filled = [
            {"role": role, "content": _filled(content, value, mapping, where)} for role, content in mapping.messages
        ]
        messages = _messages("messages", filled, where)
    made = {"text": text} if messages is None else {"messages": list(messages)}
    fields = _fields({**{key: content for key, content in value.items() if key != "token_ids"}, **made}, where)
    inputs = NO_INPUTS if messages is None else _inputs(value, where, mapping)
    return PromptLine(number, text, messages=messages, fields=fields, key=next(iter(made)), inputs=inputs)


def _inputs(row: Mapping[str, Any], where: str, mapping: RowMapping) -> TemplateInputs:
    """Return what a row of messages gives to the chat template. Raises DataError."""
    try:
        return TemplateInputs.of_row(row)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise DataError(
            f"{where}: {mapping.label(key)}: {problem}. Chat templates get this column; if it is for something else, rename it"
        ) from None


def _fields(value: dict[str, Any], where: str) -> str:
    """Return the fields for reward functions as compact JSON with sorted keys. Raises DataError."""
    try:
        fields = _to_json(value)
        size = len(fields.encode("utf-8"))
    except UnicodeEncodeError:
        raise DataError(f"{where}: contains half of a character (a lone surrogate); {EXPECTED}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: {_column_without_json(value) or error}, or leave the column out with ignore_columns in data.sets"
        ) from None
    if size > MAX_FIELDS_BYTES:
        raise DataError(
            f"{where}: {size} bytes of text and fields, expected at most {MAX_FIELDS_BYTES}; shorten them, "
            "or keep what is long in a file that your reward function reads"
        )
    return fields


def _to_json(value: Any) -> str:
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, default=as_json
    )


def _column_without_json(value: dict[str, Any]) -> str:
    """Return the first column whose value has no JSON, the value, and what to do."""
    for name, content in value.items():
        try:
            _to_json(content)
        except TypeError as error:
            return f"column {name} holds {error}"
        except ValueError:
            number = f"{content} is" if isinstance(content, float) else "has NaN or infinity, which are"
            return f"column {name}: {number} not a number in JSON; write null instead"
        except RecursionError:
            return f"column {name} is nested too deeply; write it as text"
    return ""


def as_json(value: Any) -> str:
    """Return a value of Parquet that JSON lacks as text. Raises TypeError that names it and what to do."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        raise TypeError(f"the decimal number {value}, which JSON lacks; convert it to a float or a text")
    if isinstance(value, bytes):
        raise TypeError(f"bytes of length {len(value)}, which JSON lacks; convert them to a text")
    raise TypeError(f"a value of type {type(value).__name__}, which JSON lacks; convert it to a number or a text")


def _shown(content: Any) -> str:
    """Describe a JSON value that has the wrong type."""
    if isinstance(content, dict):
        return f"an object with {_names(content)}"
    kinds = {bool: "", int: "the number ", float: "the number ", list: "a list of ", str: "the text "}
    text = str(len(content)) if isinstance(content, list) else json.dumps(content, ensure_ascii=False, default=str)
    return f"{kinds.get(type(content), '')}{text if len(text) <= 60 else text[:60] + '...'}"


def _messages(key: str, value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key} is {'empty' if value == [] else 'not a list'}; {EXPECTED}")
    if len(value) > MAX_MESSAGES:
        raise DataError(f"{where}: {key}: {len(value)} messages, expected at most {MAX_MESSAGES}")
    if isinstance(first := value[0], dict) and "role" not in first and {"from", "value"} <= first.keys():
        raise DataError(
            f"{where}: {key}: message 1 has from and value, as in ShareGPT; rename them to role (user, assistant, system) and "
            "content"
        )
    for place, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: {key}: message {place} is not an object; {EXPECTED}")
        if not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {key}: message {place}: role is missing or not a string; {EXPECTED}")
        if not message["role"]:
            raise DataError(f"{where}: {key}: message {place}: role is empty; expected user, assistant, system, ...")
        if problem := content_problem(message):
            raise DataError(f"{where}: {key}: message {place}: {problem}")
    return tuple(value)
