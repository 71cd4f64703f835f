"""Fixtures: generators, and an actor whose weights they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.rpc.clients import ActorClient
from tests.services.model_services import Services
from tests.services.orchestrator.rollout.generator_pools import Generators


@pytest.fixture(scope="session")
def pool_config(make_config: Callable[..., Config]) -> Config:
    return make_config(rollout={"max_concurrent_sequences": 4, "generators": 1, "share_weights": False})


@pytest.fixture(scope="session")
def publishing_actor(pool_config: Config, session_services: Services) -> ActorClient:
    """An actor that no test updates. Every test is another run for it."""
    client: ActorClient = session_services.start(Role.ACTOR, pool_config)
    return client


@pytest.fixture
def generators(pool_config: Config, publishing_actor: ActorClient, stream: RolloutStream) -> Iterator[Generators]:
    result = Generators(pool_config, publishing_actor, stream)
    yield result
    result.stop()
