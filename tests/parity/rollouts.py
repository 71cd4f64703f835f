"""What a TRL trainer did in one update, captured for comparison: its rollouts, its figures and the weights it ended with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.parity.figures import Number, Weights


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Ragged rollouts. Per sequence: ids, ``truncated``, ``prompt_index``; arrays flat float32 [response tokens]."""

    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    prompt_index: list[int]
    truncated: list[bool]
    log_probs: NDArray[np.float32]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens, int64 [sequences]."""
        return np.array([len(response) for response in self.responses], np.int64)


@dataclass(frozen=True, slots=True)
class TrlUpdate:
    """One update as TRL took it: rollouts, ``figures`` by Quartet's names (a number or a flat array), the weights after it."""

    rollouts: Rollouts
    figures: dict[str, Number]
    policy: Weights
    critic: Weights = field(default_factory=dict)
