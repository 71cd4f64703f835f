"""Tokenization of prompts, with checks and notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from quartet.data.prompt_lines import Message, PromptLine
from quartet.errors import DataError
from quartet.types import Prompt

ENCODE_LINES = 1024
"""Lines per tokenizer call. The limit saves memory, because a tokenizer's output is much larger than the kept ids."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Functions that turn prompts into token ids.

    ``texts`` tokenizes texts. ``chat`` tokenizes the messages of one prompt with the tokenizer's chat template; it is None
    without a template. ``chat_unopened`` does the same without the generation prompt, which opens the response. ``bos_id`` is the
    token that the tokenizer may add at the start of a text. ``model`` is the model of the tokenizer.
    """

    model: str
    texts: Callable[[list[str]], list[list[int]]]
    chat: Callable[[list[Message]], list[int]] | None = None
    chat_unopened: Callable[[list[Message]], list[int]] | None = None
    bos_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> PromptEncoder:
        """Create an encoder from a transformers tokenizer. It adds special tokens to texts, but not to messages."""

        def texts(batch: list[str]) -> list[list[int]]:
            result: list[list[int]] = tokenizer(batch, return_attention_mask=False)["input_ids"] if batch else []
            return result

        def chat(messages: list[Message], opened: bool = True) -> list[int]:
            # No special tokens are added: the template contains a BOS if the model needs one.
            result: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)
            return result

        bos_id = getattr(tokenizer, "bos_token_id", None)
        if not getattr(tokenizer, "chat_template", None):
            return cls(model, texts, bos_id=bos_id)
        return cls(model, texts, chat, partial(chat, opened=False), bos_id)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenized prompts, and notes for the user about their encoding."""

    prompts: list[Prompt]
    notes: list[str]


@dataclass(slots=True)
class _Counts:
    """Numbers of prompts, by kind and by the change that the encoding made."""

    lines: int = 0
    texts: int = 0
    chats: int = 0
    too_long: int = 0
    ended: int = 0
    begun_twice: int = 0
    chats_ended: int = 0
    ids_ended: int = 0
    after_assistant: int = 0
    unopened: bool = False

    def add_text(self, ids: list[int], stop_ids: frozenset[int], bos_id: int | None) -> list[int]:
        """Count a text and return its ids without final stop tokens: some tokenizers add them, but a response must follow."""
        self.lines += 1
        self.texts += 1
        self.begun_twice += bos_id is not None and ids[:2] == [bos_id, bos_id]
        length = len(ids)
        while length > 1 and ids[length - 1] in stop_ids:
            length -= 1
        self.ended += length < len(ids)
        return ids[:length]

    def add_given(self, line: PromptLine, ids: list[int], stop_ids: frozenset[int]) -> list[int]:
        """Count messages or token ids, and return the ids unchanged, even if they end with a stop token."""
        self.lines += 1
        ended = bool(ids) and ids[-1] in stop_ids
        if line.messages is None:
            self.ids_ended += ended
        else:
            self.chats += 1
            self.chats_ended += ended
            self.after_assistant += line.messages[-1]["role"] == "assistant"
        return ids

    def notes(self, encoder: PromptEncoder, max_prompt_tokens: int) -> Iterator[str]:
        """Yield one line per note for the user."""
        of_all = f"of {self.lines} prompts"
        if self.too_long:
            yield f"{self.too_long} {of_all} are over data.max_prompt_tokens {max_prompt_tokens} and dropped"
        if self.ended:
            yield f"{self.ended} {of_all} ended with end-of-sequence tokens; they are taken off"
        if self.begun_twice:
            yield (
                f"{self.begun_twice} {of_all} are text that begins with the beginning-of-sequence token twice; the tokenizer "
                "adds one, leave it out of the text"
            )
        if self.chats:
            yield f"{self.chats} {of_all} are messages, written out by the chat template of {encoder.model}"
        if self.unopened:
            yield (
                f"the template of {encoder.model} writes no generation prompt: the response may begin with the "
                "assistant's header"
            )
        for count, kind in ((self.chats_ended, "messages"), (self.ids_ended, "token_ids")):
            if count:
                yield (
                    f"{count} {of_all} are {kind} that end with an end-of-sequence token; they are used as they are, "
                    "and the policy continues after the end"
                )
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
    """Tokenize and check prompts, and drop those that are too long. ``index`` of a prompt is its line, from 0.

    ``limit``: maximum number of prompts. Later lines are not read. Raises DataError if a prompt has no tokens or ids outside the
    vocabulary, if the chat template is missing or refuses its messages, or if no prompt is left.
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
            if line.text is not None:
                ids = counts.add_text(next(texts), stop_ids, encoder.bos_id)
            else:
                ids = counts.add_given(line, _given_ids(line, encoder, where), stop_ids)
            if line.messages is not None and counts.chats == 1:
                counts.unopened = _is_unopened(line.messages, ids, encoder)
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


def _given_ids(line: PromptLine, encoder: PromptEncoder, where: str) -> list[int]:
    """Return the ids of a line, or those of its messages by the chat template."""
    if line.messages is None:
        return list(line.token_ids or ())
    if encoder.chat is None:
        raise DataError(
            f"{where}: messages, but the tokenizer of {encoder.model} has no chat template; give prompts as text, "
            "or save the checkpoint with a tokenizer that has one (chat_template.jinja)"
        )
    try:
        return encoder.chat([dict(message) for message in line.messages])
    except Exception as error:  # A template may raise anything.
        reason = next((text.strip() for text in str(error).splitlines() if text.strip()), "no reason given")
        raise DataError(
            f"{where}: the chat template of {encoder.model} refuses these messages: {reason[:200]} "
            f"({type(error).__name__}); correct the roles and their order, or give the prompt as text"
        ) from None


def _is_unopened(messages: Sequence[Message], ids: list[int], encoder: PromptEncoder) -> bool:
    """Return whether the chat template gives the same ``ids`` without a generation prompt."""
    if encoder.chat_unopened is None:
        return False
    try:
        return encoder.chat_unopened([dict(message) for message in messages]) == ids
    except Exception:  # A template that refuses messages without a final assistant message does distinguish the two.
        return False
