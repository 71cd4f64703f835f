"""Fixtures of all tests."""

from tests.conftest import _logs, redis_url
from tests.environments.conftest import model

__all__ = ["_logs", "model", "redis_url"]
