"""Fence against the requests of a former leader."""

from __future__ import annotations

from quartet.errors import StaleLeaderEpoch


class LeaderFence:
    """The highest leader epoch that a process has seen."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, leader_epoch: int) -> None:
        """Record the highest leader epoch. Raises StaleLeaderEpoch for a lower one: another orchestrator is the leader."""
        if leader_epoch < self.epoch:
            raise StaleLeaderEpoch(f"leader_epoch {leader_epoch}: an orchestrator of epoch {self.epoch} has taken over")
        self.epoch = leader_epoch
