"""An environment whose episodes all have the same number of turns, and which notes every turn that it gets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from quartet.environments import Environment

NOTES = "corridor"
"""File in the working directory with a line for each turn: seed and number."""


class Corridor(Environment):
    """A walk of ``turns`` turns. An observation is a digit, which depends on the seed and all turns so far."""

    def __init__(self, turns: int, restores: bool = True) -> None:
        self._turns, self._restores = turns, restores
        self._seed, self._turn, self._place = 0, 0, 0

    def reset(self, seed: int, fields: dict[str, Any]) -> str:
        self._seed, self._place = seed, seed % 1009
        return self._shown()

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        with Path(NOTES).open("a", encoding="utf-8") as file:
            file.write(f"{self._seed} {self._turn}\n")
        self._place = random.Random(f"{self._place} {text}").randrange(1009)
        return self._shown(), self._place % 7 / 7 / self._turns, self._turn == self._turns

    def snapshot(self) -> Any:
        return [self._seed, self._turn, self._place] if self._restores else None

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        self._seed, self._turn, self._place = state

    def _shown(self) -> str:
        return str(self._place % 10)
