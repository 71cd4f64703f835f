"""Stop strings: texts that end a response after the token that completes one of them.

Tokens have no fixed text: the text of a token can depend on its neighbours, and a character can be split between tokens. So the
check decodes the end of a response, but only after tokens that can complete a stop string. The result depends on the response's
own tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import BoolArray, IntArray
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import VersionSpan
from quartet.engines.engine import EngineResponse, TokenDecoder
from quartet.errors import InvalidRequest

CONTEXT_TOKENS = 4
"""Tokens that are decoded before the longest possible stop string, because decoders change the start of a text."""
REPLACEMENT = "\ufffd"
"""Text of bytes that are not a whole character."""

_UNKNOWN, _NO, _MAYBE = 0, 1, 2


def token_decoder(tokenizer: Any) -> TokenDecoder:
    """Return a function that decodes token ids with a Hugging Face tokenizer, special tokens included."""

    def decode(token_ids: Sequence[int] | IntArray) -> str:
        ids = [int(token) for token in token_ids]
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode


class StopStrings:
    """The stop strings of a generation. Keeps which tokens can complete one."""

    def __init__(self, strings: Sequence[str], decode: TokenDecoder, vocabulary_size: int) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._last = {string[-1] for string in strings}
        if any(not character.isascii() for character in self._last):
            self._last.add(REPLACEMENT)
        # Each token of a stop string has at least one of its bytes.
        self._window = max(len(string.encode()) for string in strings) + CONTEXT_TOKENS
        self._kinds = np.zeros(vocabulary_size, np.int8)

    def covers(self, token_ids: NDArray[np.int64]) -> bool:
        """Return whether all ids, int64 [tokens], are in the vocabulary."""
        return bool(len(token_ids)) and int(token_ids.min()) >= 0 and int(token_ids.max()) < len(self._kinds)

    def candidates(self, token_ids: NDArray[Any]) -> BoolArray:
        """Return for each token whether it can complete a stop string: bool [tokens]."""
        kinds = self._kinds[token_ids]
        for token in np.unique(token_ids[kinds == _UNKNOWN]).tolist():
            # Twice, because some decoders drop a space at the start.
            text = self._decode([token, token])
            self._kinds[token] = _MAYBE if any(character in text for character in self._last) else _NO
        return np.asarray(self._kinds[token_ids] == _MAYBE)

    def completed_by(self, token_ids: IntArray) -> bool:
        """Return whether the last of the tokens of a response, int32 [tokens], completes a stop string."""
        text = self._decode(token_ids[-self._window :])
        return any(string in text for string in self._strings)

    def end_of(self, token_ids: IntArray) -> int | None:
        """Return the number of tokens up to the one that completes a stop string; None if there is none."""
        for index in np.flatnonzero(self.candidates(token_ids)).tolist():
            if self.completed_by(token_ids[: index + 1]):
                return int(index) + 1
        return None


class StopStringCache:
    """The ``StopStrings`` of the last sampling parameters, so that what it has learned about tokens is kept."""

    def __init__(self, decode: TokenDecoder | None, vocabulary_size: int) -> None:
        """``decode`` is None in a process without a tokenizer."""
        self._decode, self._size = decode, vocabulary_size
        self._last: tuple[tuple[str, ...], StopStrings] | None = None

    def of(self, sampling: SamplingParameters) -> StopStrings | None:
        """Return the check, or None without stop strings. Raises InvalidRequest if there is no tokenizer for it."""
        strings = sampling.stop_strings
        if not strings:
            return None
        if self._decode is None:
            raise InvalidRequest("stop_strings: this process has no tokenizer; start it with the config of the run")
        if self._last is None or self._last[0] != strings:
            self._last = strings, StopStrings(strings, self._decode, self._size)
        return self._last[1]


def cut(response: EngineResponse, stop_strings: StopStrings | None) -> EngineResponse:
    """Return a response up to the token that completes a stop string, if there is one, marked as ``stopped``.

    An engine may generate further tokens before it notices, or know no stop strings. Those tokens are dropped.
    """
    ids = np.asarray(response.token_ids, np.int64)
    # Ids outside the vocabulary are an error that ``check_response`` reports.
    if stop_strings is None or not stop_strings.covers(ids):
        return response
    end = stop_strings.end_of(ids.astype(np.int32))
    if end is None:
        return response
    log_probs = None if response.log_probs is None else response.log_probs[:end]
    return replace(
        response,
        token_ids=response.token_ids[:end],
        log_probs=log_probs,
        spans=first_tokens(response.spans, end),
        stopped=True,
    )


def first_tokens(spans: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first ``tokens`` tokens."""
    result, left = list[VersionSpan](), tokens
    for span in spans:
        if left > 0:
            result.append(replace(span, tokens=min(span.tokens, left)))
        left -= span.tokens
    return tuple(result)
