"""Faults of scorers, and the responses that they concern."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quartet.contract.trajectory import Outcome, TokenBatch

MARK = "w9"
"""Word of the responses for which a faulty scorer fails. It is token 9 of ``tiny.tokenizer``."""
HANG_SECONDS = 30.0
"""Time for which a hanging scorer does not respond. Its callers give up long before."""
HANG_TIMEOUT = 0.5
"""Time limit of the sources whose scorer hangs, in seconds."""
TIMEOUT = 20.0
"""Time limit of the other sources under test. No test waits for it."""

FAULTS = {
    "hang": Outcome.TIMEOUT,
    "error": Outcome.SCORER_ERROR,
    "overloaded": Outcome.SCORER_ERROR,
    "refusal": Outcome.REFUSED,
    "too few": Outcome.SCORER_ERROR,
    "too many": Outcome.SCORER_ERROR,
    "nan": Outcome.SCORER_ERROR,
    "infinity": Outcome.SCORER_ERROR,
    "boolean": Outcome.SCORER_ERROR,
    "string": Outcome.SCORER_ERROR,
    "null": Outcome.SCORER_ERROR,
    "broken": Outcome.SCORER_ERROR,
    "empty": Outcome.SCORER_ERROR,
    "cut": Outcome.SCORER_ERROR,
    "reset": Outcome.SCORER_ERROR,
    "oversized": Outcome.SCORER_ERROR,
}
"""Every fault with the outcome of the responses that it concerns."""


@dataclass(frozen=True)
class Responses:
    """Sequences, some of whose responses have the mark."""

    batch: TokenBatch
    marked: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """The scores of a scorer without a fault: a quarter of the number of words."""
        return (self.batch.response_lengths / 4).astype(np.float32)


def score_of(text: str) -> float:
    """Score of a response: a quarter of the number of its words."""
    return len(text.split()) / 4


def responses() -> Responses:
    """Return seven sequences, of which two have the mark."""
    parts, marked = [], []
    for index in range(7):
        has_mark = index in (1, 4)
        response = [20 + index] * (index % 4 + 1)
        if has_mark:
            response[-1] = 9
        parts.append(([30 + index] * (index % 3 + 1), response))
        marked.append(has_mark)
    ids = np.array([token for prompt, response in parts for token in (*prompt, *response)], np.int32)
    lengths = [np.array([len(part[side]) for part in parts], np.int32) for side in (0, 1)]
    return Responses(TokenBatch(ids, *lengths), np.array(marked))
