"""Penalties on tokens that have occurred, with the formulas of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.contract.generation import Penalties


def penalize(logits: torch.Tensor, penalties: Penalties, in_prompt: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return float32 logits after ``penalties``.

    Shapes: logits [n, vocabulary], in_prompt bool and counts int32 [n, vocabulary]: the tokens of the prompt, and the number of
    times that each token occurs in the response. Sources: Keskar et al. 2019 for repetition; the OpenAI API for the others.
    """
    result, in_response = logits.float(), counts > 0
    if penalties.repetition != 1:
        scaled = torch.where(result > 0, result / penalties.repetition, result * penalties.repetition)
        result = torch.where(in_prompt | in_response, scaled, result)
    if penalties.frequency:
        result = result - penalties.frequency * counts
    if penalties.presence:
        result = result - penalties.presence * in_response
    return result


class Occurrences:
    """The tokens that have occurred in each row of a batch, on the device of the model."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros((rows, vocabulary), dtype=torch.bool, device=device)
        self._counts = torch.zeros((rows, vocabulary), dtype=torch.int32, device=device)

    def begin(self, first: int, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Begin responses to ``prompts`` in the rows from ``first`` on."""
        rows = slice(first, first + len(prompts))
        self._counts[rows] = 0
        self._in_prompt[rows] = False
        for row, prompt in enumerate(prompts, first):
            self._in_prompt[row, torch.from_numpy(np.unique(prompt).astype(np.int64)).to(self._in_prompt.device)] = True

    def add(self, tokens: torch.Tensor) -> None:
        """Count the next token of each of the first rows, int64 [rows]."""
        rows = torch.arange(len(tokens), device=tokens.device)
        self._counts[rows, tokens] += 1

    def move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Move the rows ``source`` to the rows ``to``."""
        for tensor in (self._in_prompt, self._counts):
            tensor[to] = tensor[source]

    def penalized(self, logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of the first rows after ``penalties``."""
        rows = len(logits)
        return penalize(logits, penalties, self._in_prompt[:rows], self._counts[:rows])
