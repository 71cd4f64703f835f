"""The interface of a metric sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quartet.contract.control import Alert


class Sink(Protocol):
    """Receiver of the metrics of a run. Only one thread calls it. An exception drops this sink and affects nothing else."""

    def continues_from(self, step: int) -> None:
        """Continue after ``step``, 0 at the start of a run. Metrics of later steps are obsolete."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a committed step."""

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Receive an evaluation of the policy after ``step``."""

    def alert(self, alert: Alert) -> None:
        """Receive an alert of a guard."""

    def close(self) -> None:
        """Finish: no more calls follow."""


def with_prefix(group: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with names such as ``train/reward_mean``, without ``step``."""
    return {f"{group}/{name}": value for name, value in metrics.items() if name != "step"}
