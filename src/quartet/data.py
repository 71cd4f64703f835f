"""Prompts: read from JSON Lines, tokenised once, dealt out to the steps in an order that the seed decides."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from quartet.errors import ConfigError, DataError
from quartet.random_streams import prompt_order
from quartet.types import Prompt

EXPECTED = (
    'expected a JSON object with "text" (a string), "messages" (a list of objects with "role" and "content") '
    'or "token_ids" (a list of integers)'
)
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line that is read."""
MAX_FIELDS_BYTES = 1024 * 1024
"""Longest JSON object of a line's own fields, text and messages included: it goes with every request for its scores."""
MAX_MESSAGES = 1024
"""Most messages of one prompt."""
ENCODE_LINES = 1024
"""Lines that are tokenised at once: what a tokenizer makes of them is many times what is kept."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: text or messages that are still to be tokenised, or token ids as they are.

    ``fields`` is what reward functions get of it: a JSON object of everything but ``token_ids``.
    """

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    fields: str = "{}"


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """How prompts become token ids.

    ``texts`` takes texts to the ids of each; ``chat`` takes one prompt's messages to ids, through the tokenizer's chat template,
    and is None where there is none. ``model`` says whose tokenizer it is.
    """

    model: str
    texts: Callable[[list[str]], list[list[int]]]
    chat: Callable[[list[Message]], list[int]] | None = None

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> PromptEncoder:
        """By a transformers tokenizer: texts with the special tokens that it adds, messages with those of its template alone."""

        def texts(batch: list[str]) -> list[list[int]]:
            found: list[list[int]] = tokenizer(batch, return_attention_mask=False)["input_ids"] if batch else []
            return found

        def chat(messages: list[Message]) -> list[int]:
            # It tokenises without adding special tokens: the template has written out a BOS where the model wants one.
            found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            return found

        return cls(model, texts, chat if getattr(tokenizer, "chat_template", None) else None)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenised prompts, and what a user should know of how they came about."""

    prompts: list[Prompt]
    notes: list[str]


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Every prompt of a JSON Lines file, blank lines left out. Raises DataError naming file and line."""
    return list(iterate_prompt_lines(path))


def iterate_prompt_lines(path: Path) -> Iterator[PromptLine]:
    """The same one by one, for files that need not be in memory as a whole."""
    found = False
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(_bounded_lines(file, path), 1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
                if raw.strip():
                    found = True
                    yield _parse(raw, f"prompts {path}:{number}", number)
    except OSError as error:
        raise DataError(
            f"prompts {path}: cannot be read ({error.strerror}); give a JSON Lines file (data.prompts, --file)"
        ) from None
    if not found:
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
    found = [key for key, content in given.items() if content is not None]
    if len(found) != 1:
        raise DataError(f"{where}: found {' and '.join(found) or 'none'} of text, messages and token_ids; {EXPECTED}")
    kind = found[0]
    if kind != "token_ids":
        value[kind] = given[kind]
    fields = _fields(value, where)
    if kind == "text":
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: text is {'empty' if text == '' else 'not a string'}; {EXPECTED}")
        return PromptLine(number, text, fields=fields)
    if kind == "messages":
        return PromptLine(number, messages=_messages(messages, where), fields=fields)
    whole = isinstance(token_ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in token_ids)
    if not whole or not token_ids:
        raise DataError(f"{where}: token_ids is not a list of token ids; {EXPECTED}")
    return PromptLine(number, token_ids=tuple(token_ids), fields=fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _fields(value: dict[str, Any], where: str) -> str:
    """The line's own fields as compact JSON, keys sorted: what a reward function gets. Raises DataError."""
    try:
        fields = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        size = len(fields.encode("utf-8"))
    except UnicodeEncodeError:
        raise DataError(f"{where}: holds half of a character (a lone surrogate); {EXPECTED}") from None
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


@dataclass(slots=True)
class _Counts:
    """What happened to the prompts on their way, in prompts."""

    lines: int = 0
    texts: int = 0
    chats: int = 0
    too_long: int = 0
    ended: int = 0
    after_assistant: int = 0

    def add(self, line: PromptLine) -> None:
        """Counts a line as what it is."""
        self.lines += 1
        self.texts += line.text is not None
        if line.messages is not None:
            self.chats += 1
            self.after_assistant += line.messages[-1]["role"] == "assistant"

    def notes(self, encoder: PromptEncoder, max_prompt_tokens: int) -> Iterator[str]:
        """One line for each thing that a user should know of."""
        of_all = f"of {self.lines} prompts"
        if self.too_long:
            yield f"{self.too_long} {of_all} are over data.max_prompt_tokens {max_prompt_tokens} and dropped"
        if self.ended:
            yield f"{self.ended} {of_all} ended with an end-of-sequence token; it is taken off"
        if self.chats:
            yield f"{self.chats} {of_all} are messages, written out by the chat template of {encoder.model}"
        if self.after_assistant:
            yield (
                f"{self.after_assistant} {of_all} end with a message of the assistant; the response is a new one after it"
            )
        if self.texts and encoder.chat is not None:
            yield (
                f"the tokenizer of {encoder.model} has a chat template; {self.texts} {of_all} are plain text and used "
                "as they are (messages would go through it)"
            )


def encode_prompts(
    path: Path,
    lines: Iterable[PromptLine],
    encoder: PromptEncoder,
    stop_ids: frozenset[int],
    vocabulary_size: int,
    max_prompt_tokens: int,
    limit: int | None = None,
) -> PromptSet:
    """Tokenises, checks, and drops what is too long, by count. ``index`` of a prompt is its line, from 0.

    ``limit``: so many prompts are enough, and what follows them is not looked at.
    Raises DataError when a prompt has no tokens or ids outside the vocabulary, when the chat template is missing or refuses
    its messages, or when no prompt is left.
    """
    prompts: list[Prompt] = []
    counts = _Counts()
    remaining = iter(lines)
    while len(prompts) != limit and (batch := list(islice(remaining, ENCODE_LINES))):
        texts = iter(encoder.texts([line.text for line in batch if line.text is not None]))
        for line in batch:
            if len(prompts) == limit:
                break
            where = f"prompts {path}:{line.line}"
            ids = _given_ids(line, encoder, where) if line.text is None else _opened(next(texts), stop_ids, counts)
            counts.add(line)
            if not ids:
                raise DataError(f"{where}: the tokenizer makes no token of it; remove the line")
            if max(ids) >= vocabulary_size:
                raise DataError(f"{where}: token id {max(ids)}; the policy's vocabulary is 0..{vocabulary_size - 1}")
            if len(ids) > max_prompt_tokens:
                counts.too_long += 1
                continue
            prompts.append(Prompt(line.line - 1, np.array(ids, np.int32), line.text or "", line.fields))
    if not prompts:
        raise DataError(
            f"prompts {path}: all {counts.lines} are over data.max_prompt_tokens {max_prompt_tokens}; raise it"
        )
    return PromptSet(prompts, list(counts.notes(encoder, max_prompt_tokens)))


def _opened(ids: list[int], stop_ids: frozenset[int], counts: _Counts) -> list[int]:
    """A text's ids without the end that some tokenizers close every text with: a policy that reads it has nothing to add."""
    if len(ids) < 2 or ids[-1] not in stop_ids:
        return ids
    counts.ended += 1
    return ids[:-1]


def _given_ids(line: PromptLine, encoder: PromptEncoder, where: str) -> list[int]:
    """The ids that a line gives itself, or those that the chat template makes of its messages."""
    if line.messages is None:
        return list(line.token_ids or ())
    if encoder.chat is None:
        raise DataError(
            f"{where}: messages, but the tokenizer of {encoder.model} has no chat template; give prompts as text, "
            "or save the checkpoint with a tokenizer that has one (chat_template.jinja)"
        )
    try:
        return encoder.chat([dict(message) for message in line.messages])
    except Exception as error:  # A template raises whatever it likes.
        reason = next((text.strip() for text in str(error).splitlines() if text.strip()), "no reason given")
        raise DataError(
            f"{where}: the chat template of {encoder.model} refuses these messages: {reason[:200]} "
            f"({type(error).__name__}); mend roles and their order, or give the prompt as text"
        ) from None


class PromptOrder:
    """Which prompts a step takes: passes over the data set, each in its own order, as a pure function of seed and step.

    The remainder of a pass that does not fill a step is left out of that pass; another pass leaves out others. A run that
    resumes goes on where it was without any state: the prompts of a step do not depend on those before.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int) -> None:
        """Raises ConfigError when the data set cannot fill one step."""
        if len(prompts) < prompts_per_step:
            raise ConfigError(
                f"rollout.prompts_per_step {prompts_per_step}: data.prompts has only {len(prompts)} usable prompts; "
                "lower it or give more prompts"
            )
        self._prompts, self._per_step, self._seed = prompts, prompts_per_step, seed
        self._steps_per_pass = len(prompts) // prompts_per_step

    def of_step(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 1."""
        number, place = divmod(step - 1, self._steps_per_pass)
        order = prompt_order(self._seed, number, len(self._prompts))
        chosen = order[place * self._per_step : (place + 1) * self._per_step]
        return [self._prompts[index] for index in chosen]
