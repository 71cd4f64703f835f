"""Fixtures: a separate run and rollout stream for each test."""

from __future__ import annotations

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace(" ", "")


@pytest.fixture
def stream(redis_client: Redis, redis_url: str, run: str) -> RolloutStream:
    result = RolloutStream(redis_client, redis_url, run)
    result.reset()
    return result
