"""Fixtures that all engine tests share."""

from tests.conftest import _logs
from tests.engines.conftest import checkpoint, server, subject

__all__ = ["_logs", "checkpoint", "server", "subject"]
