"""Rows of a stage as token ids, tokenized as in a run: the prompt by the chat template, the answer as text, and EOS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from quartet.config.supervised import SftConfig, StageConfig
from quartet.data.chat_template import TemplateInputs
from quartet.data.preference_pairs import (
    Demonstration,
    Pair,
    is_held_out,
    messages_of,
    read_demonstrations,
    read_pairs,
)
from quartet.data.prompt_encoding import PromptEncoder
from quartet.errors import DataError, ModelError

BATCH = 1024
"""Rows per call of the tokenizer."""
Row = Pair | Demonstration


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of a prompt and of its answers, which end in EOS: one, or the chosen and the rejected one of a pair."""

    prompt: list[int]
    answers: tuple[list[int], ...]
    margin: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the longer conversation."""
        return len(self.prompt) + max(map(len, self.answers))

    def to_sft(self) -> dict[str, list[int]]:
        """Return the columns that TRL's SFTTrainer takes. Only the answer has labels."""
        (answer,) = self.answers
        return {"input_ids": self.prompt + answer, "labels": [-100] * len(self.prompt) + answer}

    def to_pair(self, margin_coefficient: float) -> dict[str, Any]:
        """Return the columns that TRL's RewardTrainer takes."""
        chosen, rejected = (self.prompt + answer for answer in self.answers)
        margin = {"margin": margin_coefficient * self.margin} if margin_coefficient else {}
        return {"chosen_ids": chosen, "rejected_ids": rejected, **margin}


@dataclass(frozen=True, slots=True)
class StageRows:
    """Rows to train on, and held-out rows, which may be none."""

    training: list[EncodedRow]
    validation: list[EncodedRow]


def _split(config: StageConfig, report: Callable[[str], None]) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on, and the held-out ones. Every stage with the same fraction holds out the same ones."""
    data, read = config.data, read_demonstrations if isinstance(config, SftConfig) else read_pairs
    rows: list[Row] = list(read(data.train))
    if data.validation is not None:
        return rows, list(read(data.validation))
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        parts[is_held_out(row.opening, data.validation_fraction)].append(row)
    if not parts[0]:
        raise DataError(f"{data.train}: all rows are held out; give more rows, or set data.validation_fraction 0")
    if data.validation_fraction and not parts[1]:
        report(
            f"warning: {data.train}: data.validation_fraction {data.validation_fraction:g} holds out none of {len(rows):,} rows; "
            "raise it, or name held-out rows as data.validation"
        )
    return parts


def read_rows(config: StageConfig, tokenizer: Any, positions: int | None, report: Callable[[str], None]) -> StageRows:
    """Read, check and tokenize the rows of a stage. ``positions``: maximum length of the model. Raises DataError."""
    data, limit = config.data, min(config.data.max_tokens, positions or config.data.max_tokens)
    encoder = PromptEncoder.of(tokenizer, config.model.path)
    inputs = TemplateInputs(chat_template_kwargs=data.chat_template_kwargs)
    end = [tokenizer.eos_token_id]

    def encode(rows: Sequence[Row], name: str) -> list[EncodedRow]:
        encoded = list(
            chain.from_iterable(
                _encoded(rows[at : at + BATCH], encoder, inputs, end) for at in range(0, len(rows), BATCH)
            )
        )
        short = [row for row in encoded if row.length <= limit]
        dropped = len(rows) - len(short)
        if rows and (not short or dropped > data.max_dropped_fraction * len(rows)):
            raise DataError(
                f"{name}: {dropped:,} of {len(rows):,} rows are longer than {limit} tokens, more than "
                f"data.max_dropped_fraction {data.max_dropped_fraction:g}; raise data.max_tokens up to the positions of the "
                "model, or data.max_dropped_fraction"
            )
        report(f"{name}: {len(short):,} of {len(rows):,} rows have at most {limit} tokens")
        return short

    training, validation = _split(config, report)
    return StageRows(encode(training, "data.train"), encode(validation[: data.max_validation_rows], "held-out rows"))


def _encoded(
    rows: Sequence[Row], encoder: PromptEncoder, inputs: TemplateInputs, end: list[int]
) -> Iterable[EncodedRow]:
    assert encoder.render is not None, "the tokenizer was checked"
    try:
        texts = [encoder.render(messages_of(row.prompt), "generation prompt", inputs) for row in rows]
    except Exception as error:  # A template may raise anything.
        raise ModelError(f"{encoder.model}: its chat template cannot write a prompt of the rows: {error}") from None
    prompts = encoder.chats(texts)
    answers = [[row.answer] if isinstance(row, Demonstration) else [row.chosen, row.rejected] for row in rows]
    ids = iter(encoder.chats([text for each in answers for text in each]))
    for row, prompt, each in zip(rows, prompts, answers, strict=True):
        margin = row.margin or 0.0 if isinstance(row, Pair) else 0.0
        yield EncodedRow(prompt, tuple(next(ids) + end for _ in each), margin)
