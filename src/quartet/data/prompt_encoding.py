"""Tokenization of prompts, with checks and notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import Prompt
from quartet.data.chat_template import ChatTemplate, Ending, Message, TemplateInputs
from quartet.data.prompt_lines import PromptLine
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import DataError, first_line

ENCODE_LINES = 1024
"""Lines per tokenizer call. The limit saves memory, because a tokenizer's output is much larger than the kept ids."""

_TEXT, _CHAT, _IDS, _ENDED, _BEGUN_TWICE = 1, 2, 4, 8, 16
"""Flags of an encoded prompt: its kind, whether it ended with a stop token, whether it begins with two BOS tokens."""
_FEATURES = ("generation prompt", "tools", "documents")
"""Features that a chat template may ignore."""
MAX_SHOWN_VARIABLES = 8
"""Maximum number of unread variables that a note names."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Functions that turn prompts into token ids.

    ``texts`` tokenizes texts, and ``chats`` tokenizes what ``render`` returns: the messages of one prompt, written out by the
    tokenizer's chat template. ``render`` is None without a template. ``reads`` tells whether the template reads a variable.
    ``bos_id`` is the token that the tokenizer may add at the start of a text, ``adds_bos`` whether it does. ``model`` is the
    model of the tokenizer.
    """

    model: str
    texts: Callable[[list[str]], list[list[int]]]
    render: Callable[[list[Message], Ending, TemplateInputs], str] | None = None
    chats: Callable[[list[str]], list[list[int]]] = lambda _: []
    reads: Callable[[str], bool] = lambda _: True
    bos_id: int | None = None
    adds_bos: bool = False

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> PromptEncoder:
        """Create an encoder from a transformers tokenizer. It adds special tokens to texts, but not to messages."""

        def texts(batch: list[str]) -> list[list[int]]:
            result: list[list[int]] = tokenizer(batch, return_attention_mask=False)["input_ids"] if batch else []
            return result

        def chats(batch: list[str]) -> list[list[int]]:
            # No special tokens are added: the template writes a BOS if the model needs one.
            options = {"add_special_tokens": False, "return_attention_mask": False}
            result: list[list[int]] = tokenizer(batch, **options)["input_ids"] if batch else []
            return result

        bos_id = getattr(tokenizer, "bos_token_id", None)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        template = ChatTemplate(tokenizer)
        render = template.render if has_template else None
        adds_bos = bos_id is not None and texts(["a"])[0][:1] == [bos_id]
        return cls(model, texts, render, chats, template.reads, bos_id, adds_bos)


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Token ids and contents of the prompts of a file, before ``select_prompts`` drops or truncates long ones.

    ``rows`` int64 [prompts] are their lines, from 1. Prompt i has token_ids[token_ends[i - 1]:token_ends[i]], int32; its text and
    fields are slices of ``texts`` and ``fields``, in UTF-8, in the same way. ``flags`` uint8 [prompts]. ``template``: whether the
    tokenizer has a chat template, whether the tokenizer adds a BOS token to texts, and whether the template ignores each of
    _FEATURES. ``bos_id`` is -1 without one. ``unread`` has the names of given variables that the template does not read, a line
    each, in UTF-8.
    """

    rows: NDArray[np.int64]
    flags: NDArray[np.uint8]
    token_ids: IntArray
    token_ends: NDArray[np.int64]
    texts: NDArray[np.uint8]
    text_ends: NDArray[np.int64]
    fields: NDArray[np.uint8]
    field_ends: NDArray[np.int64]
    template: NDArray[np.bool_]
    bos_id: NDArray[np.int32]
    unread: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Raise ValueError for arrays that do not fit together."""
        shapes = {"template": 2 + len(_FEATURES), "bos_id": 1}
        dtypes = {"rows": np.int64, "token_ids": np.int32, "template": np.bool_, "bos_id": np.int32}
        for item in fields(self):
            array = getattr(self, item.name)
            default = np.int64 if item.name.endswith("_ends") else np.uint8
            if array.ndim != 1 or array.dtype != dtypes.get(item.name, default):
                raise ValueError(f"{item.name}: {array.dtype} {array.shape}")
            if item.name in shapes and len(array) != shapes[item.name]:
                raise ValueError(f"{item.name}: {array.shape}")
        for data, ends in (
            (self.token_ids, self.token_ends),
            (self.texts, self.text_ends),
            (self.fields, self.field_ends),
        ):
            steps = np.diff(ends, prepend=0)
            if len(ends) != len(self.rows) or len(ends) != len(self.flags) or (steps < 0).any():
                raise ValueError("the ends do not fit the prompts")
            if len(data) != (ends[-1] if len(ends) else 0):
                raise ValueError("the ends do not fit the data")

    @classmethod
    def of(cls, parts: _Parts, template: list[bool], bos_id: int | None, unread: Iterable[str]) -> EncodedPrompts:
        """Return the collected prompts as arrays."""
        texts, fields = ([text.encode() for text in column] for column in (parts.texts, parts.fields))
        return cls(
            np.array(parts.rows, np.int64),
            np.array(parts.flags, np.uint8),
            np.concatenate([np.empty(0, np.int32), *parts.token_ids]),
            _ends(parts.token_ids),
            np.frombuffer(b"".join(texts), np.uint8),
            _ends(texts),
            np.frombuffer(b"".join(fields), np.uint8),
            _ends(fields),
            np.array(template),
            np.array([-1 if bos_id is None else bos_id], np.int32),
            np.frombuffer("\n".join(unread).encode(), np.uint8),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers of tokens, int64 [prompts]."""
        return np.diff(self.token_ends, prepend=0)

    def prompt(self, number: int, ids: IntArray) -> Prompt:
        """Return a prompt with these token ids. ``number`` counts from 0."""
        text, content = (
            bytes(data[ends[number - 1] if number else 0 : ends[number]]).decode()
            for data, ends in ((self.texts, self.text_ends), (self.fields, self.field_ends))
        )
        return Prompt(int(self.rows[number]) - 1, ids, text, content)


def _ends(items: list[Any]) -> NDArray[np.int64]:
    return np.cumsum([len(item) for item in items], dtype=np.int64)


class _Parts:
    """Columns of encoded prompts, to which prompts are added."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.flags: list[int] = []
        self.token_ids: list[IntArray] = []
        self.texts: list[str] = []
        self.fields: list[str] = []

    def add(self, line: PromptLine, flags: int, ids: list[int]) -> None:
        self.rows.append(line.line)
        self.flags.append(flags)
        self.token_ids.append(np.array(ids, np.int32))
        self.texts.append(line.text or "")
        self.fields.append(line.fields)


@dataclass(frozen=True, slots=True)
class PromptSummary:
    """Numbers of usable prompts and of messages among all prompts, tokens of the longest usable prompt, and notes."""

    num_prompts: int
    num_messages: int
    max_length: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenized prompts, and notes for the user about their encoding. Warnings among the notes start with "warning: ".

    ``num_rows``: number of the last row of the set, which is at least the index of every prompt.
    """

    prompts: list[Prompt]
    notes: list[str]
    num_rows: int = 0


def encode_prompts(
    settings: PromptSettings,
    lines: Iterable[PromptLine],
    encoder: PromptEncoder,
    stop_ids: frozenset[int],
    vocabulary_size: int,
) -> PromptSet:
    """Tokenize, check and select prompts. Raises DataError, see ``encode_lines`` and ``select_prompts``."""
    return select_prompts(encode_lines(settings, lines, encoder, stop_ids), settings, vocabulary_size)


def encode_lines(
    settings: PromptSettings,
    lines: Iterable[PromptLine],
    encoder: PromptEncoder,
    stop_ids: frozenset[int],
    show_progress: Callable[[int], None] = lambda _: None,
) -> EncodedPrompts:
    """Tokenize prompts, all or as many as ``settings.limit`` needs. ``show_progress`` gets the number of tokenized lines.

    Raises DataError if a prompt has no tokens, ends with a message of the assistant that is not to be continued, or if the chat
    template is missing or refuses its messages.
    """
    parts = _Parts()
    ignored: dict[str, bool] = {}
    reads: dict[str, bool] = {}
    remaining = iter(lines)
    usable = 0
    while usable != settings.limit:
        wanted = ENCODE_LINES if settings.limit is None else min(ENCODE_LINES, settings.limit - usable)
        batch = list(islice(remaining, wanted))
        if not batch:
            break
        endings = [_ending(line, settings) for line in batch]
        chats = [
            _render(line, encoder, ending, settings)
            for line, ending in zip(batch, endings, strict=True)
            if line.messages is not None
        ]
        texts = iter(encoder.texts([line.text for line in batch if line.text is not None]))
        chat_ids = iter(encoder.chats(chats))
        for line, ending in zip(batch, endings, strict=True):
            if line.messages is not None:
                inputs = line.inputs.over(settings.inputs)
                for name in (inputs.chat_template_kwargs or {}).keys() - reads.keys():
                    reads[name] = encoder.reads(name)
                if ending == "generation prompt":
                    _find_ignored(ignored, line, encoder, inputs)
            flags, ids = _with_flags(line, texts, chat_ids, stop_ids, encoder.bos_id)
            if not ids:
                raise DataError(
                    f"{settings.location(line.line)}: the tokenizer makes no token of {settings.mapping.label(line.key)}; remove "
                    "the line"
                )
            usable += settings.truncation is not None or len(ids) <= settings.max_prompt_tokens
            parts.add(line, flags, ids)
        show_progress(len(parts.rows))
    template = [encoder.render is not None, encoder.adds_bos, *(ignored.get(name, False) for name in _FEATURES)]
    unread = sorted(name for name, is_read in reads.items() if not is_read)
    return EncodedPrompts.of(parts, template, encoder.bos_id, unread)


def _with_flags(
    line: PromptLine,
    texts: Iterator[list[int]],
    chats: Iterator[list[int]],
    stop_ids: frozenset[int],
    bos_id: int | None,
) -> tuple[int, list[int]]:
    """Return the flags and ids of a line. A text loses its final stop tokens: some tokenizers add them, but a response must
    follow. Messages and token ids are returned unchanged, even if they end with a stop token."""
    if line.text is None:
        ids = list(line.token_ids or ()) if line.messages is None else next(chats)
        ended = bool(ids) and ids[-1] in stop_ids
        return (_IDS if line.messages is None else _CHAT) | (_ENDED if ended else 0), ids
    ids = next(texts)
    length = len(ids)
    while length > 1 and ids[length - 1] in stop_ids:
        length -= 1
    begun_twice = bos_id is not None and ids[:2] == [bos_id, bos_id]
    flags = _TEXT | (_ENDED if length < len(ids) else 0) | (_BEGUN_TWICE if begun_twice else 0)
    return flags, ids[:length]


def _ending(line: PromptLine, settings: PromptSettings) -> Ending:
    """Return what follows the messages of a line. Raises DataError if the assistant's last message is not to be continued."""
    if line.messages is None or line.messages[-1]["role"] != "assistant":
        return "generation prompt" if settings.opens_response else "nothing"
    if not settings.continue_final_message:
        raise DataError(
            f"{settings.location(line.line)}: the last message is the assistant's; set data.continue_final_message "
            "(quartet generate: --continue-final-message) to continue it, or remove the message"
        )
    return "open message"


def _render(line: PromptLine, encoder: PromptEncoder, ending: Ending, settings: PromptSettings) -> str:
    """Return the messages of a line as text by the chat template. Raises DataError with row and column."""
    where, label = settings.location(line.line), settings.mapping.label(line.key)
    if encoder.render is None:
        raise DataError(
            f"{where}: {label} needs a chat template, but the tokenizer of {encoder.model} has none; give prompts as text, "
            "or save the checkpoint with a tokenizer that has one (chat_template.jinja)"
        )
    try:
        return _written(line, encoder, ending, line.inputs.over(settings.inputs))
    except Exception as error:  # A template may raise anything.
        reason = first_line(error, "no reason given")
        raise DataError(
            f"{where}: the chat template of {encoder.model} refuses the messages of {label}: {reason[:200]} "
            f"({type(error).__name__}); correct the roles and their order, or give the prompt as text"
        ) from None


def _written(line: PromptLine, encoder: PromptEncoder, ending: Ending, inputs: TemplateInputs) -> str:
    """Return the messages of a line as text. Raises whatever the template raises."""
    assert encoder.render is not None
    return encoder.render([dict(message) for message in line.messages or ()], ending, inputs)


def _find_ignored(ignored: dict[str, bool], line: PromptLine, encoder: PromptEncoder, inputs: TemplateInputs) -> None:
    """Add to ``ignored`` the features that a line is the first to have, and whether the template writes the same without them."""
    without: dict[str, tuple[Ending, TemplateInputs]] = {"generation prompt": ("nothing", inputs)}
    for key in _FEATURES[1:]:
        if getattr(inputs, key):
            without[key] = ("generation prompt", replace(inputs, **{key: None}))
    for name in without.keys() - ignored.keys():
        ending, others = without[name]
        try:
            text = _written(line, encoder, "generation prompt", inputs)
            ignored[name] = text == _written(line, encoder, ending, others)
        except Exception:  # A template that refuses messages without it does not ignore it.
            ignored[name] = False


def select_prompts(encoded: EncodedPrompts, settings: PromptSettings, vocabulary_size: int | None) -> PromptSet:
    """Return the prompts to use. ``index`` of a prompt is its line, from 0. Long prompts are dropped or truncated.

    Raises DataError, see ``summarize_prompts``.
    """
    summary = summarize_prompts(encoded, settings, vocabulary_size)
    prompts = []
    lengths, limit = encoded.lengths, settings.max_prompt_tokens
    for number, (end, length) in enumerate(zip(encoded.token_ends, lengths, strict=True)):
        ids = encoded.token_ids[end - length : end]
        if length > limit:
            if settings.truncation is None:
                continue
            ids = _truncated(ids, settings, int(encoded.bos_id[0]))
        prompts.append(replace(encoded.prompt(number, ids), prompt_set=settings.mapping.set_name))
    return PromptSet(prompts, summary.notes, int(encoded.rows[-1]) if len(encoded.rows) else 0)


def summarize_prompts(encoded: EncodedPrompts, settings: PromptSettings, vocabulary_size: int | None) -> PromptSummary:
    """Return the numbers of the prompts that ``select_prompts`` selects.

    Raises DataError if a prompt has ids outside the vocabulary, unless ``vocabulary_size`` is None, or if the fraction of dropped
    prompts exceeds ``settings.max_dropped_fraction``.
    """
    size = 2**31 if vocabulary_size is None else vocabulary_size
    outside = (encoded.token_ids < 0) | (encoded.token_ids >= size)
    if outside.any():
        position = int(np.argmax(outside))
        row = int(encoded.rows[np.searchsorted(encoded.token_ends, position, side="right")])
        raise DataError(
            f"{settings.location(row)}: token id {encoded.token_ids[position]}; the policy's vocabulary is "
            f"0..{size - 1}"
        )
    lengths, limit = encoded.lengths, settings.max_prompt_tokens
    too_long = int(np.count_nonzero(lengths > limit))
    dropped = too_long if settings.truncation is None else 0
    # The fraction says little about a part of a file, and a reached limit means that there are enough prompts.
    if len(lengths) - dropped != settings.limit:
        _check_dropped(dropped, len(lengths), settings)
    used = lengths[lengths <= limit] if dropped else np.minimum(lengths, limit)
    return PromptSummary(
        len(used),
        int(np.count_nonzero(encoded.flags & _CHAT)),
        int(used.max(initial=0)),
        list(_notes(encoded, settings, too_long)),
    )


def _check_dropped(dropped: int, lines: int, settings: PromptSettings) -> None:
    fraction = settings.max_dropped_fraction
    if dropped and (dropped == lines or dropped / lines > fraction):
        limit = f", more than data.max_dropped_fraction {fraction:g}" if dropped < lines else ""
        advice = "raise it, or set data.truncation to left or right"
        raise DataError(
            f"prompts {settings}: {'all ' if dropped == lines else ''}{dropped:,} of {lines:,} are over "
            f"data.max_prompt_tokens {settings.max_prompt_tokens} and would be dropped{limit}; {advice}"
            f"{', or raise data.max_dropped_fraction' if limit else ''}"
        )


def _truncated(ids: IntArray, settings: PromptSettings, bos_id: int) -> IntArray:
    """Return the first or last ``max_prompt_tokens`` ids. A cut on the left keeps a leading BOS token."""
    count = settings.max_prompt_tokens
    if settings.truncation == "right":
        return ids[:count]
    if ids[0] == bos_id and count > 1:
        return np.concatenate([ids[:1], ids[len(ids) - count + 1 :]])
    return ids[len(ids) - count :]


def _notes(encoded: EncodedPrompts, settings: PromptSettings, too_long: int) -> Iterator[str]:
    """Yield one line per note for the user."""
    model, flags = settings.model, encoded.flags
    of_all = f"of {len(flags):,} prompts"
    has_template, adds_bos, unopened, *ignored = encoded.template

    def count(*wanted: int) -> int:
        return int(np.count_nonzero((flags & sum(wanted)) == sum(wanted)))

    if too_long and settings.truncation is None:
        yield (
            f"warning: {too_long:,} {of_all} are over data.max_prompt_tokens {settings.max_prompt_tokens} and dropped; "
            "raise it, or set data.truncation"
        )
    elif too_long:
        yield (
            f"{too_long:,} {of_all} are over data.max_prompt_tokens {settings.max_prompt_tokens} and truncated on the "
            f"{settings.truncation}"
        )
    if ended := count(_TEXT, _ENDED):
        yield f"{ended:,} {of_all} ended with end-of-sequence tokens; they are taken off"
    if begun_twice := count(_BEGUN_TWICE):
        yield (
            f"{begun_twice:,} {of_all} are text that begins with the beginning-of-sequence token twice; the tokenizer "
            "adds one, leave it out of the text"
        )
    if chats := count(_CHAT):
        yield f"{chats:,} {of_all} are messages, written out by the chat template of {model}"
    starts = encoded.token_ends - encoded.lengths
    without_bos = (flags & _CHAT > 0) & (encoded.token_ids[starts] != encoded.bos_id[0]) if len(starts) else flags[:0]
    if adds_bos and (number := int(np.count_nonzero(without_bos))):
        yield (
            f"warning: {number:,} {of_all} are messages for which the chat template of {model} writes no beginning-of-sequence "
            "token, which its tokenizer adds to texts; if the model was trained with it, begin the template with {{ bos_token }}"
        )
    if unopened:
        yield (
            f"the template of {model} writes no generation prompt: the response may begin with the assistant's header"
        )
    for name, is_ignored in zip(_FEATURES[1:], ignored, strict=True):
        if is_ignored:
            yield f"warning: the template of {model} writes the same with and without {name}; it may not support them"
    # A template of the environment may read others in its turns.
    if (names := bytes(encoded.unread).decode().split()) and not settings.has_turn_template:
        more = f" and {len(names) - MAX_SHOWN_VARIABLES} more" if len(names) > MAX_SHOWN_VARIABLES else ""
        yield (
            f"warning: chat_template_kwargs {', '.join(names[:MAX_SHOWN_VARIABLES])}{more}: not used: the template of {model} "
            "reads no variable of this name; correct it, or remove it"
        )
    for kind, name in ((_CHAT, "messages"), (_IDS, "token_ids")):
        if ended := count(kind, _ENDED):
            yield (
                f"{ended:,} {of_all} are {name} that end with an end-of-sequence token; they are used as they are, "
                "and the policy continues after the end"
            )
    if has_template and not settings.for_agents and (texts := count(_TEXT)):
        yield (
            f"the tokenizer of {model} has a chat template; {texts:,} {of_all} are plain text and used "
            "as they are (messages would go through it)"
        )
