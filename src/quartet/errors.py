"""Domain exceptions. This module knows neither gRPC nor HTTP: the edges (rpc, gateway, cli) map each class to a status.

A service sends the class of its error to the caller, which raises the same class (see ``quartet.rpc.status_codes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class QuartetError(Exception):
    """Base class of all errors that Quartet raises on purpose. The message says what is wrong, where, what was expected and what
    to do.
    """

    service: str = ""
    """The service that a call failed at: its name, or NAME at ADDRESS. Empty if the error is of another kind."""


class ConfigError(QuartetError):
    """The configuration, or a file it names, is wrong. The user can fix it; a retry fails again."""


class DataError(ConfigError):
    """A prompts file that is missing, empty or malformed."""


class ModelError(ConfigError):
    """A checkpoint is missing, unreadable, or of a kind that the role cannot use."""


class MismatchError(ConfigError):
    """Two parts do not match although they must: role and address, vocabularies, tokenizers, policy versions."""


class AccessRefused(ConfigError):
    """Another process refuses this one: the certificates or tokens of the two do not match."""


class InvalidRequest(QuartetError):
    """A request is malformed: wrong dtype, shape, length or range, or a token id outside the vocabulary."""


class FailedPrecondition(QuartetError):
    """A valid request does not fit the current state: wrong step order, stale policy version, unknown experience."""


class NoSessionsYet(FailedPrecondition):
    """A call has waited for sessions of users for as long as it may. The caller repeats it."""


class SessionLost(FailedPrecondition):
    """A session that an environment service does not have: it has expired, or its process was restarted."""


class StaleLeaderEpoch(FailedPrecondition):
    """The request of an orchestrator whose term as the leader is over: the service has seen a higher leader epoch."""


class LeadershipConflict(FailedPrecondition):
    """Another orchestrator holds the lease of this run."""


class Cancelled(QuartetError):
    """The caller cancelled the work, or disconnected."""


class DeadlinePassed(Cancelled):
    """The caller's deadline passed before the work was done."""


class ServiceUnavailable(QuartetError):
    """A service, or the rollout buffer, cannot be reached."""


class ServiceBusy(QuartetError):
    """A service has reached its limit of pending calls. The same call may succeed later."""


class QuotaExceeded(ServiceBusy):
    """A run has used its quota of a service that several runs share. The same call succeeds later."""

    def __init__(self, text: str, retry_seconds: float = 1.0) -> None:
        """``retry_seconds``: time after which the caller should try again."""
        super().__init__(text)
        self.retry_seconds = retry_seconds


class ServiceFailed(QuartetError):
    """A service responded with an error, or its process died."""

    failed_trajectories: Sequence[Any] = ()
    """Trajectories that failed, if the error stands for the failures of a whole step."""


class EngineFailed(ServiceFailed):
    """A generation engine has died or hangs. Only a restart of its process helps."""


class WeightsChanged(ServiceFailed):
    """The weights of an engine have changed since they were verified. What it generated with them is discarded."""


class GroupWeightsChanged(EngineFailed, WeightsChanged):
    """The weights of an engine in a process of an actor's group have changed. Only a restart publishes a version again."""


class NoResponse(ServiceFailed):
    """A service abandoned a call or did not respond in time. This says nothing about the request itself."""


class ComputationFailed(QuartetError):
    """A computation produced NaN or infinity instead of a finite number."""


class ScorerFailed(ComputationFailed):
    """A reward source has no score for a response. The message starts with the source.

    It quotes no prompt and no response, so logs and notes may contain the message.
    """

    outcome: str = "scorer_error"
    """Name of the ``Outcome`` of the response."""


class FunctionFailed(ScorerFailed):
    """A user's function raised, ended its process or returned a wrong value. The message starts with the function.

    It quotes the text of an exception only if the config allows that, so logs and notes may contain the message.
    """


class OutOfMemory(QuartetError):
    """A computation does not fit into the memory of a GPU or machine. The same work fails again: it must be made smaller."""


class StorageFailed(QuartetError):
    """A file of the run cannot be written: the disk is full or read-only."""


class TooManyFailedTrajectories(QuartetError):
    """More trajectories of one step failed to be scored than ``recovery.max_failed_trajectories`` allows."""

    def __init__(self, text: str, failed_trajectories: Sequence[Any] = ()) -> None:
        """``failed_trajectories`` are those that failed, if known."""
        super().__init__(text)
        self.failed_trajectories = failed_trajectories


class TooManyEqualGroups(QuartetError):
    """A step needs more rounds of dynamic sampling than ``rollout.max_sampling_rounds`` allows."""


class BufferFailed(QuartetError):
    """The rollout buffer responded, but with an error or with other data than was stored."""


def first_line(error: BaseException, default: str | None = None) -> str:
    """Return the first line of an error's text that is not blank. Without one, return ``default``, or else the error's class."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__ if default is None else default)
