"""Fixtures that all engine tests share."""

from tests.conftest import _logs
from tests.engines.conftest import checkpoint, subject

__all__ = ["_logs", "checkpoint", "subject"]
