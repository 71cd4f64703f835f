"""Fixtures that all engine tests share."""

from tests.conftest import _logs
from tests.engines.conftest import sglang_checkpoint

__all__ = ["_logs", "sglang_checkpoint"]
