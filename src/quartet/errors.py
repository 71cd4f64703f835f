"""Domain exceptions. The edges (rpc, cli) decide what each one means to a caller; nothing here knows gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class QuartetError(Exception):
    """Base of every error that Quartet raises on purpose. The message says what, where, what was expected, what to do."""


class ConfigError(QuartetError):
    """The configuration, or a file it names, is wrong: the user can mend it."""


class DataError(ConfigError):
    """A prompts file is missing, empty or malformed."""


class ModelError(ConfigError):
    """A checkpoint is missing, unreadable, or of a kind that the role cannot use."""


class MismatchError(ConfigError):
    """Two parts that must agree do not: role and address, vocabularies, tokenizers, policy versions."""


class AccessRefused(ConfigError):
    """A process does not let this one call it: the certificates or tokens of the two do not fit."""


class InvalidRequest(QuartetError):
    """A request is malformed: wrong dtype, shape, length, range, or a token id outside the vocabulary."""


class FailedPrecondition(QuartetError):
    """A request is well formed but cannot be met in this state: wrong step order, stale policy version, unknown experience."""


class Cancelled(QuartetError):
    """The caller went away before the work was done."""


class DeadlinePassed(Cancelled):
    """The caller's deadline passed before the work was done."""


class ServiceUnavailable(QuartetError):
    """A service, or the rollout buffer, cannot be reached."""


class ServiceBusy(QuartetError):
    """A service has as many calls in hand as it takes; the same call may succeed later."""


class ServiceFailed(QuartetError):
    """A service answered with an error, or its process died."""


class NoResponse(ServiceFailed):
    """A service gave a call up, or did not answer it in time: that says nothing of what was asked."""


class LeadershipConflict(FailedPrecondition):
    """Another orchestrator leads this run, and is alive."""


class ComputationFailed(QuartetError):
    """The numerics went wrong (NaN or infinity where a finite number is required)."""


class StorageFailed(QuartetError):
    """A file of the run cannot be written: the disk is full, or not to be written to."""


class TooManyFailedTrajectories(QuartetError):
    """More trajectories of one step could not be scored than may be set aside. ``failed_trajectories`` are those, where they are known."""

    def __init__(self, text: str, failed_trajectories: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.failed_trajectories = failed_trajectories


class BufferFailed(QuartetError):
    """The rollout buffer answered, but not with what was stored."""
