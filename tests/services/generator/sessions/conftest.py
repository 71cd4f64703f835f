"""A server for sessions, a tokenizer, and records in Redis."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.turn_records import TurnRecords, TurnRecordStore
from quartet.contract.generation import GenerationBatch
from quartet.services.generator.sessions.app import SessionServer
from tests.services.generator.sessions.harness import Rig, Script, make_tokenizer, scripted_rig, torch_rig

Records = Callable[[GenerationBatch], TurnRecords]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def server() -> Iterator[SessionServer]:
    result = SessionServer("127.0.0.1:0")
    result.start()
    yield result
    result.close()


@pytest.fixture
def records(redis_client: Redis, redis_url: str) -> Records:
    return lambda batch: TurnRecordStore(redis_client, redis_url, batch.run).records_of(batch)


@pytest.fixture
def rig(server: SessionServer, tokenizer: Any, records: Records) -> Rig:
    """A rig with the torch engine."""
    return torch_rig(server, tokenizer, records)


@pytest.fixture
def scripted(server: SessionServer, tokenizer: Any, records: Records) -> Callable[[Script], Rig]:
    """Function that returns a rig whose engine follows a script."""
    return lambda script: scripted_rig(server, tokenizer, records, script)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test."""
    return f"s-{hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()}"
