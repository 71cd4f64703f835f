"""The lead of a run: what changes whenever the orchestrator takes it, handed to whoever acts under it."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.buffer.lease import Lease
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.recovery import Recovered, Recovery
from quartet.services.orchestrator.telemetry.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Leadership:
    """One hold on the run: its lease, where it goes on from, and what the algorithm remembers from there on."""

    lease: Lease
    algorithm_state: AlgorithmState
    recovery: Recovery
    recovered: Recovered
    stopwatch: Stopwatch

    @property
    def epoch(self) -> int:
        """What every request under this lead says, so that a service refuses a former leader's."""
        return self.lease.epoch

    def check(self) -> None:
        """Renews the lease. Raises FailedPrecondition when it is lost."""
        with self.stopwatch.part("lease"):
            self.lease.check()
