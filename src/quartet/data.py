"""Prompts: read from JSON Lines, tokenised once, dealt out to the steps in an order that the seed decides."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quartet.errors import ConfigError, DataError
from quartet.random_streams import prompt_order
from quartet.types import Prompt

EXPECTED = 'expected a JSON object with "text" (a string) or "token_ids" (a list of integers)'
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line that is read."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file: text that is still to be tokenised, or token ids as they are."""

    line: int
    text: str | None
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenised prompts, and what a user should know of how they came about."""

    prompts: list[Prompt]
    notes: list[str]


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Every prompt of a JSON Lines file, blank lines left out. Raises DataError naming file and line."""
    lines: list[PromptLine] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
                if len(raw) > MAX_LINE_BYTES:
                    raise DataError(f"prompts {path}:{number}: longer than {MAX_LINE_BYTES} bytes; {EXPECTED}")
                if raw.strip():
                    lines.append(_parse(raw, f"prompts {path}:{number}", number))
    except OSError as error:
        raise DataError(
            f"prompts {path}: cannot be read ({error.strerror}); give a JSON Lines file (data.prompts, --file)"
        ) from None
    if not lines:
        raise DataError(
            f"prompts {path}: empty; expected at least one prompt, {EXPECTED.removeprefix('expected ')} a line"
        )
    return lines


def _parse(raw: bytes, where: str, number: int) -> PromptLine:
    try:
        value: Any = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}; {EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); {EXPECTED}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}; {EXPECTED}")
    text, token_ids = value.get("text"), value.get("token_ids")
    if (text is None) == (token_ids is None):
        found = "both" if text is not None else "neither"
        raise DataError(f"{where}: found {found} of text and token_ids; {EXPECTED}")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: text is {'empty' if text == '' else 'not a string'}; {EXPECTED}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{where}: text holds half of a character (a lone surrogate); {EXPECTED}")
        return PromptLine(number, text, None)
    whole = isinstance(token_ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in token_ids)
    if not whole or not token_ids:
        raise DataError(f"{where}: token_ids is not a list of token ids; {EXPECTED}")
    return PromptLine(number, None, tuple(token_ids))


def encode_prompts(
    path: Path,
    lines: Sequence[PromptLine],
    encode: Callable[[list[str]], list[list[int]]],
    stop_ids: frozenset[int],
    vocabulary_size: int,
    max_prompt_tokens: int,
) -> PromptSet:
    """Tokenises, checks, and drops what is too long, by count. ``index`` of a prompt is its line, from 0.

    Raises DataError when a prompt has no tokens or ids outside the vocabulary, or when none is left.
    """
    encoded = iter(encode([line.text for line in lines if line.text is not None]))
    prompts: list[Prompt] = []
    too_long = ended = 0
    for line in lines:
        ids = next(encoded) if line.token_ids is None else list(line.token_ids)
        where = f"prompts {path}:{line.line}"
        if line.token_ids is None and len(ids) > 1 and ids[-1] in stop_ids:
            # Some tokenizers close every text; a policy that reads an end has nothing to add.
            ids, ended = ids[:-1], ended + 1
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of it; remove the line")
        if max(ids) >= vocabulary_size:
            raise DataError(f"{where}: token id {max(ids)}; the policy's vocabulary is 0..{vocabulary_size - 1}")
        if len(ids) > max_prompt_tokens:
            too_long += 1
            continue
        prompts.append(Prompt(line.line - 1, np.array(ids, np.int32), line.text or ""))
    notes = []
    if too_long:
        notes.append(
            f"{too_long} of {len(lines)} prompts are over data.max_prompt_tokens {max_prompt_tokens} and dropped"
        )
    if ended:
        notes.append(f"{ended} of {len(lines)} prompts ended with an end-of-sequence token; it is taken off")
    if not prompts:
        raise DataError(
            f"prompts {path}: all {len(lines)} are over data.max_prompt_tokens {max_prompt_tokens}; raise it"
        )
    return PromptSet(prompts, notes)


class PromptOrder:
    """Which prompts a step takes: passes over the data set, each in its own order, as a pure function of seed and step.

    The remainder of a pass that does not fill a step is left out of that pass; another pass leaves out others.
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
