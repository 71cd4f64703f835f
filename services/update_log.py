"""Idempotency of the Update RPC: the order of steps, fencing of old leader epochs, and the recorded result."""

from __future__ import annotations

from collections.abc import Callable

from quartet.contract.leader_fence import LeaderFence
from quartet.contract.update import UpdateResult
from quartet.errors import BufferFailed, FailedPrecondition, InvalidRequest, ServiceUnavailable

_BEFORE_ANY_STEP = (InvalidRequest, FailedPrecondition, BufferFailed, ServiceUnavailable)
"""Errors that an update can only raise before it touches the weights."""


class UpdateLog:
    """The updates that were applied to one trained model. Steps rise by one. A repeated step returns its recorded result."""

    def __init__(self) -> None:
        self.run = ""
        self.step = 0
        self.fence = LeaderFence()
        """Highest leader epoch seen. A lower one is refused: another orchestrator is the leader."""
        self._last: UpdateResult | None = None
        self._broken_at: int | None = None

    @property
    def policy_version(self) -> int:
        """Number of updates applied."""
        return self.step

    @property
    def broken(self) -> bool:
        """Return whether an update or a restore was interrupted."""
        return self._broken_at is not None

    def check_run(self, run: str) -> None:
        """Raise FailedPrecondition if updates of another run were applied to the model."""
        if self.step and run != self.run:
            raise FailedPrecondition(
                f"run {run}: this model is at step {self.step} of run {self.run}; restart the service for another run"
            )

    def check_not_broken(self) -> None:
        """Raise FailedPrecondition if an update or restore was interrupted: the weights belong to no step."""
        if self._broken_at is not None:
            raise FailedPrecondition(
                f"the update of step {self._broken_at} was interrupted and left the weights "
                "between two steps; restart the service"
            )

    def check_save(self, run: str, leader_epoch: int, step: int | None = None) -> None:
        """Raise FailedPrecondition unless this leader may save the model of this run, unbroken and at ``step`` if given."""
        self.fence.check(leader_epoch)
        self.check_run(run)
        self.check_not_broken()
        if step is not None and step != self.step:
            raise FailedPrecondition(
                f"save of step {step}: this model is at step {self.step}; restore it to step {step} first"
            )

    def restore(self, run: str, step: int, leader_epoch: int, apply: Callable[[], None]) -> None:
        """Restore ``step`` of ``run``: ``apply`` loads its weights and optimizer state. The next update is ``step`` + 1.

        Raises FailedPrecondition for a lower leader epoch. If ``apply`` raises, its error is raised and the model is broken.
        """
        self.fence.check(leader_epoch)
        self._broken_at = step
        apply()
        self.run, self.step, self._last, self._broken_at = run, step, None, None

    def admit(self, run: str, step: int, leader_epoch: int) -> UpdateResult | None:
        """Return the recorded result if this step is applied already, or None if it is the next.

        Raises FailedPrecondition for any other step, another run, a lower leader epoch, or after an interrupted update.
        """
        self.fence.check(leader_epoch)
        self.check_not_broken()
        if self._last is not None and (run, step) == (self.run, self.step):
            return self._last
        self.check_run(run)
        if step != self.step + 1:
            raise FailedPrecondition(
                f"update of step {step}: this model is at step {self.step}, the next is {self.step + 1}"
            )
        return None

    def record(self, run: str, step: int, metrics: dict[str, float]) -> UpdateResult:
        """Record an applied update."""
        self.run, self.step = run, step
        self._last = UpdateResult(step=step, policy_version=self.policy_version, metrics=metrics)
        return self._last

    def once(self, run: str, step: int, leader_epoch: int, apply: Callable[[], dict[str, float]]) -> UpdateResult:
        """Apply a step's update unless it is applied already. ``apply`` returns its metrics. For errors see ``admit``.

        After any other error, some optimizer steps may have been taken, so the model is broken and further updates are refused.
        """
        applied = self.admit(run, step, leader_epoch)
        if applied is not None:
            return applied
        try:
            return self.record(run, step, apply())
        except _BEFORE_ANY_STEP:
            raise
        except Exception:
            self._broken_at = step
            raise
