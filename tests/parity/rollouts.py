"""The result of one update of a TRL trainer: its rollouts, its metrics, and the weights after the update."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.parity.comparison import Number, Weights


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Ragged rollouts: lists with an item per sequence, and ``log_probs`` flat, float32 [response tokens]."""

    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    prompt_index: list[int]
    truncated: list[bool]
    log_probs: NDArray[np.float32]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of response tokens of each sequence, int64 [sequences]."""
        return np.array([len(response) for response in self.responses], np.int64)


@dataclass(frozen=True, slots=True)
class TrlUpdate:
    """One update by TRL: rollouts, ``metrics`` under Quartet's names (numbers or flat arrays), and the weights after it."""

    rollouts: Rollouts
    metrics: dict[str, Number]
    policy: Weights
    critic: Weights = field(default_factory=dict)
