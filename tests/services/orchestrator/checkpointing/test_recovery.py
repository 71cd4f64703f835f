"""Failures that a run recovers from, and the limit on recoveries."""

from __future__ import annotations

import pytest

from quartet import errors
from quartet.config.deployment import RecoveryConfig
from quartet.services.orchestrator.checkpointing.recovery import TRANSIENT_ERRORS, RecoveryAttempts

PERMANENT = (
    errors.ConfigError,
    errors.DataError,
    errors.ModelError,
    errors.MismatchError,
    errors.AccessRefused,
    errors.OutOfMemory,
    errors.StorageFailed,
    errors.ComputationFailed,
    errors.InvalidRequest,
    errors.TooManyEqualGroups,
    errors.TooManyFailedTrajectories,
)


def test_permanent_errors_are_not_retried() -> None:
    assert [kind.__name__ for kind in PERMANENT if issubclass(kind, TRANSIENT_ERRORS)] == []


def test_attempts_end_after_the_configured_number_without_progress() -> None:
    attempts = RecoveryAttempts(RecoveryConfig(max_recoveries=2, backoff_seconds=0.01))
    lost = errors.ServiceUnavailable("gone")
    for step in (1, 2):
        attempts.pause_after(lost)
        attempts.pause_after(lost)
        attempts.record_commit(step)
    attempts.pause_after(lost)
    attempts.pause_after(lost)
    with pytest.raises(
        errors.ServiceUnavailable,
        match=r"gave up after 2 recoveries in .* of recovery\.max_recoveries; fix .* or raise the limit; the last failure: ",
    ):
        attempts.pause_after(lost)
