"""Texts of prompts and responses, for sources that read text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.errors import InvalidRequest
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.rewards.reward_source import parse_fields


@dataclass(frozen=True, slots=True)
class ScoredText:
    """One sequence as text.

    ``prompt``: the policy's input, with special tokens, so that the turns of a chat can be distinguished. ``response``: its
    output, without special tokens. ``fields``: the JSON object of the prompt line, {} if it has none. ``token_ids`` int32
    [tokens], of which the first ``prompt_tokens`` are the prompt. ``query`` is the text of both, with all special tokens.
    ``updates``: see ``TokenBatch``.
    """

    prompt: str
    response: str
    query: str
    fields: dict[str, Any]
    token_ids: IntArray
    prompt_tokens: int
    updates: int = 0


class ResponseTexts:
    """Decoder of a tokenizer. Tokens that it does not know have no text: a policy with a padded embedding can sample them."""

    def __init__(self, tokenizer: str) -> None:
        """Load the tokenizer. Raises ModelError."""
        self._tokenizer = load_tokenizer(tokenizer)
        self._has_text = _known_ids(self._tokenizer)

    def status(self, model: str) -> ServiceStatus:
        """Return the status of a source without a model in this process. ``model`` describes the source."""
        return ServiceStatus(
            role=Role.REWARD,
            model=model,
            device="cpu",
            tokenizer_fingerprint=tokenizer_fingerprint(self._tokenizer),
            vocabulary_size=len(self._tokenizer),
        )

    def of(self, batch: TokenBatch, fields: Sequence[str]) -> list[ScoredText]:
        """Return the texts of each sequence. Raises InvalidRequest."""
        objects = parse_fields(fields, len(batch))
        lowest = int(batch.token_ids.min())
        if lowest < 0:
            raise InvalidRequest(f"token_ids: found {lowest}, expected 0 or more")
        return [
            ScoredText(
                prompt=self._text(sequence[:prompt], special=True),
                response=self._text(sequence[prompt:], special=False),
                query=self._text(sequence, special=True),
                fields=line,
                token_ids=sequence,
                prompt_tokens=int(prompt),
                updates=batch.updates,
            )
            for sequence, prompt, line in zip(batch.sequences(), batch.prompt_lengths, objects, strict=True)
        ]

    def _text(self, token_ids: IntArray, special: bool) -> str:
        inside = token_ids[token_ids < len(self._has_text)]
        known = inside[self._has_text[inside]].tolist()
        # No clean-up of spaces: a function that compares texts needs the exact text.
        text = self._tokenizer.decode(known, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)


def _known_ids(tokenizer: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    known = np.zeros(int(ids.max()) + 1, np.bool_)
    known[ids] = True
    return known
