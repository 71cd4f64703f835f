"""Preference pairs and demonstrations: rows with two answers to a prompt, or with one.

A row has one of these forms:

- ``chosen`` and ``rejected`` are transcripts with the turns "\\n\\nHuman:" and "\\n\\nAssistant:", as in Anthropic/hh-rlhf. If
  ``prompt`` is the beginning of the transcript, they are only the last answers.
- ``chosen`` and ``rejected`` are lists of messages, as in the binarized UltraFeedback of HuggingFaceH4 and of trl-lib: complete
  conversations, or only the last message beside ``prompt``, which is a text or a list of messages.
- ``prompt``, ``chosen`` and ``rejected`` are texts: a question and two answers.

A demonstration is the better answer of a pair, the last of ``messages``, or ``completion`` beside ``prompt``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.data.prompt_files import iterate_rows, location
from quartet.errors import DataError

Message = tuple[str, str]
"""Role and content."""
USER, ASSISTANT = "user", "assistant"
SPEAKERS = {"Human": USER, "Assistant": ASSISTANT}
TURN = re.compile(r"\n\n(Human|Assistant):")
EXPECTED = (
    'expected "chosen" and "rejected": transcripts with "\\n\\nHuman:" and "\\n\\nAssistant:", or lists of objects with "role" '
    'and "content", each with the prompt or beside "prompt"'
)


STAGES = "stages"
"""Salt of the split that the stages and `quartet init` share. It differs from the seeds of examples/dialogue, whose training part
has no conversations with a low hash: with the same salt, nothing of it would be held out."""
ANSWERS = ("chosen", "messages", "completion")
"""Columns with the answer of a demonstration."""
EXPECTED_DEMONSTRATION = 'expected "messages", "completion" beside "prompt", or "chosen" as in a preference pair'


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An answer to a prompt, whose last message is the user's."""

    prompt: tuple[Message, ...]
    answer: str

    @property
    def opening(self) -> str:
        """First message of the user in lower case, without repeated spaces. Conversations with the same one count as related."""
        return _opening(self.prompt)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, whose last message is the user's. ``margin``: the difference of their ratings, or None."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float | None = None

    @property
    def opening(self) -> str:
        """First message of the user in lower case, without repeated spaces. Conversations with the same one count as related."""
        return _opening(self.prompt)

    def to_json(self) -> dict[str, Any]:
        """Return the pair in the explicit chat format, which TRL reads, too."""
        answers = {"chosen": self.chosen, "rejected": self.rejected}
        value: dict[str, Any] = {"prompt": messages_of(self.prompt)}
        value |= {name: [{"role": ASSISTANT, "content": text}] for name, text in answers.items()}
        return value if self.margin is None else {**value, "margin": self.margin}


def messages_of(prompt: Iterable[Message]) -> list[dict[str, str]]:
    """Return messages as chat templates take them."""
    return [{"role": role, "content": content} for role, content in prompt]


def _opening(prompt: Iterable[Message]) -> str:
    return " ".join(next(content for role, content in prompt if role == USER).casefold().split())


def is_held_out(opening: str, fraction: float, salt: int | str = STAGES) -> bool:
    """Return whether the conversations with this opening are for validation. It does not depend on the other rows."""
    digest = hashlib.sha256(f"{salt}/{opening}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file. Raises DataError with file and line, also for equal answers, and for an empty file."""
    pairs = []
    for where, row in _rows(path):
        pair = parse_pair(row, where)
        if pair.chosen == pair.rejected:
            raise DataError(
                f"{where}: chosen and rejected are equal; expected two different answers, or remove the row"
            )
        pairs.append(pair)
    return pairs


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Return the demonstrations of a file. Raises DataError with file and line, and for an empty file."""
    return [parse_demonstration(row, where) for where, row in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    empty = True
    for number, row in iterate_rows(path):
        empty = False
        yield location(path, number).removeprefix("prompts "), row
    if empty:
        raise DataError(f"{path}: empty; expected at least one row")


def write_json_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def parse_pair(row: Mapping[str, Any], where: str) -> Pair:
    """Return the pair of a row. Raises DataError that begins with ``where``."""
    for name in ("chosen", "rejected"):
        if not row.get(name):
            raise DataError(f"{where}: {name} is {'empty' if name in row else 'missing'}; {EXPECTED}")
    chosen, rejected = (_conversation(row, name, where) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise DataError(
            f"{where}: chosen and rejected differ before the last message; expected two answers to one prompt"
        )
    return Pair(chosen[:-1], chosen[-1][1], rejected[-1][1], _margin(row, where))


def parse_demonstration(row: Mapping[str, Any], where: str) -> Demonstration:
    """Return the demonstration of a row. Raises DataError that begins with ``where``."""
    name = next((name for name in ANSWERS if row.get(name)), None)
    if name is None:
        raise DataError(f"{where}: has no answer; {EXPECTED_DEMONSTRATION}")
    conversation = _conversation(row, name, where)
    return Demonstration(conversation[:-1], conversation[-1][1])


def _conversation(row: Mapping[str, Any], name: str, where: str) -> tuple[Message, ...]:
    """Return prompt and answer of the column ``name``."""
    prompt, answer = row.get("prompt"), row[name]
    if isinstance(answer, list):
        messages = _messages(answer, f"{where}: {name}")
        if messages[0][0] == ASSISTANT:
            messages = (*_prompt(prompt, where), *messages)
    elif not isinstance(answer, str):
        raise DataError(f"{where}: {name} is of type {type(answer).__name__}; {EXPECTED}")
    elif TURN.match(answer):
        messages = _turns(answer, f"{where}: {name}")
    elif isinstance(prompt, str) and TURN.match(prompt):
        messages = _turns(prompt + " " + answer, f"{where}: {name}")
    else:
        messages = (*_prompt(prompt, where), (ASSISTANT, answer.strip()))
    _check_order(messages, f"{where}: {name}")
    return messages


def _prompt(prompt: object, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return ((USER, prompt.strip()),)
    if isinstance(prompt, list) and prompt:
        return _messages(prompt, f"{where}: prompt")
    raise DataError(f"{where}: prompt is missing, but chosen and rejected are only answers; {EXPECTED}")


def _messages(value: list[Any], where: str) -> tuple[Message, ...]:
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f'{where}: message {number} is not an object with "role" and "content"; {EXPECTED}')
    return tuple((message["role"], message["content"].strip()) for message in value)


def _turns(text: str, where: str) -> tuple[Message, ...]:
    before, *parts = TURN.split(text)
    if before.strip():
        raise DataError(f'{where}: has text before the first "\\n\\nHuman:"; {EXPECTED}')
    return tuple((SPEAKERS[name], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True))


def _check_order(messages: tuple[Message, ...], where: str) -> None:
    """Check that user and assistant take turns, after at most one system message, and that each message is a text in UTF-8."""
    first = 1 if messages[0][0] == "system" else 0
    for number, (role, content) in enumerate(messages, 1):
        if number > first and role != (USER, ASSISTANT)[(number - 1 - first) % 2]:
            raise DataError(
                f"{where}: message {number} is of the role {role!r}; expected user and assistant in turn, after at most one "
                "system message"
            )
        if not content:
            raise DataError(f"{where}: message {number} ({role}) is empty; expected a text")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: message {number} ({role}) contains half of a character (the lone surrogate "
                f"{content[error.start]!a}); expected a text in UTF-8, so correct the row, or remove it"
            ) from None
    if len(messages) - first < 2 or messages[-1][0] != ASSISTANT:
        raise DataError(f"{where}: ends with a message of the {messages[-1][0]}; expected an answer of the assistant")


def _margin(row: Mapping[str, Any], where: str) -> float | None:
    """Return the margin of a row, or the difference of its ratings. None without them."""
    names = ("margin",) if row.get("margin") is not None else ("score_chosen", "score_rejected")
    numbers: list[Any] = [row.get(name) for name in names]
    if all(number is None for number in numbers):
        return None
    for name, number in zip(names, numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise DataError(f"{where}: {name} is {number!r}; expected a number")
    return float(numbers[0] if len(numbers) == 1 else numbers[0] - numbers[1])


def iterate_pairs(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Pair | DataError]:
    """Yield a pair, or the error, of each row with its place."""
    for where, row in rows:
        try:
            yield parse_pair(row, where)
        except DataError as error:
            yield error
