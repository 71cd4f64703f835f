"""What a place for a run's figures is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quartet.types import Alert


class Sink(Protocol):
    """Takes a run's figures. Only one thread calls it; what it raises ends it and nothing else."""

    def continues_from(self, step: int) -> None:
        """The run goes on after ``step``, 0 at its start: whatever came of later steps was taken back."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was committed."""

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """The policy after ``step`` was evaluated."""

    def alert(self, alert: Alert) -> None:
        """A guard found something."""

    def close(self) -> None:
        """Nothing more comes."""


def under(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    """The figures as the sinks call them, ``train/reward_mean``; the step is no figure."""
    return {f"{group}/{name}": value for name, value in figures.items() if name != "step"}
