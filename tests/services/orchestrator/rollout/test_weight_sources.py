"""From which processes a generator gets its weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.weights import TransferWay, WeightTransfer
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool

ACTOR = "127.0.0.1:1"
A, B, C, D = ADDRESSES = tuple(f"127.0.0.2:{port}" for port in range(1, 5))
OLD, NEW = bytes(16), bytes([1] * 16)


@pytest.fixture
def pool(pool_config: Config) -> Iterator[GeneratorPool]:
    """A pool of which A is on the actor's machine, and the others on another one."""
    services = pool_config.services.model_copy(update={"generators": ADDRESSES})
    actor: Any = SimpleNamespace(channel=SimpleNamespace(address=ACTOR, tracer=None))
    pool = GeneratorPool(pool_config.model_copy(update={"services": services}), actor, lambda note: None)
    pool._actor_machine = "m"
    pool._resolve()
    for address, member in pool._by_address.items():
        member.status = ServiceStatus(Role.GENERATOR, machine="m" if address == A else "n")
    yield pool
    pool.close()


def give(pool: GeneratorPool, address: str, digest: bytes, way: TransferWay) -> None:
    pool._by_address[address].digest = digest
    pool._by_address[address].transfer = WeightTransfer(0, digest, way=way)


def sources(pool: GeneratorPool, address: str) -> list[str]:
    return [each for _, each in pool._sources(pool._by_address[address], NEW)]


def test_on_another_machine_the_first_takes_a_copy_and_the_others_map_it(pool: GeneratorPool) -> None:
    assert sources(pool, A) == [ACTOR]
    assert sources(pool, C) == [ACTOR]
    assert sources(pool, B) == [C, ACTOR]


def test_the_generator_that_had_the_copy_of_a_machine_takes_the_next_one(pool: GeneratorPool) -> None:
    give(pool, B, OLD, "full")
    give(pool, C, OLD, "shared memory")
    assert sources(pool, C) == [ACTOR]
    assert sources(pool, B) == [ACTOR]
    assert sources(pool, D) == [B, ACTOR]


def test_a_generator_that_only_maps_the_version_is_no_source(pool: GeneratorPool) -> None:
    give(pool, C, NEW, "shared memory")
    assert sources(pool, B) == [ACTOR]
    assert sources(pool, D) == [B, ACTOR]
    give(pool, B, NEW, "delta")
    assert sources(pool, D) == [B, ACTOR]
