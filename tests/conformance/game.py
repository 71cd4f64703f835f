"""An environment whose observations depend on the seed and on all turns."""

from __future__ import annotations

import random
from typing import Any

from quartet.environments import Environment, EnvironmentFailed

TURNS = 3


class Game(Environment):
    """A game of TURNS turns. A negative ``level`` of the prompt fails."""

    def __init__(self) -> None:
        self.random, self.turn = random.Random(0), 0

    def reset(self, seed: int, fields: dict[str, Any]) -> str:
        if fields.get("level", 0) < 0:
            raise EnvironmentFailed(f"level {fields['level']}: expected 0 or more")
        self.random.seed(seed)
        return self._text()

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        self.random.seed(f"{self.random.random()} {text}")
        return self._text(), self.random.random(), self.turn == TURNS

    def snapshot(self) -> Any:
        return [self.turn, self.random.getstate()]

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        self.turn, (version, words, gauss) = state
        self.random.setstate((version, tuple(words), gauss))

    def _text(self) -> str:
        return " ".join(str(self.random.randrange(10)) for _ in range(4))
