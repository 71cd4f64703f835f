"""The generators of a pool follow the addresses behind a host name, as replicas are added and removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from quartet.config import parse_config
from quartet.rpc.server import Server
from quartet.services.orchestrator.rollout import generator_members
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.types import Role, ServiceStatus
from tests.e2e.commands import wait_until


class IdleGenerator:
    """A generator that only reports its status."""

    role = Role.GENERATOR

    def register(self, server: grpc.Server) -> None:
        pass

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.GENERATOR)

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[str]]:
    started = [Server([IdleGenerator()], "127.0.0.1:0") for _ in range(3)]
    yield [server.address for server in started]
    for server in started:
        server.stop(0)


def test_replicas_join_and_leave_with_the_addresses_of_their_name(
    servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_members, "RESOLVE_SECONDS", 0.02)
    monkeypatch.setattr(generator_members, "CHECK_SECONDS", 0.02)
    resolved = servers[:1]
    monkeypatch.setattr(generator_members, "endpoints_at", lambda _: list(resolved))
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "buffer": {"url": "redis://far"},
        "services": {"generators": ["generator:50051"]},
    }
    actor: Any = None
    pool = GeneratorPool(parse_config(tree, "test"), actor, lambda note: None)
    try:
        pool.wait_until_ready(20)
        assert set(pool.statuses()) == {servers[0]}
        resolved[:] = servers[1:]
        wait_until(lambda: set(pool.statuses()) == set(servers[1:]), 20)
        resolved[:] = servers
        wait_until(lambda: set(pool.statuses()) == set(servers), 20)
        # A name server that does not respond takes no generator away.
        asked: list[str] = []

        def no_answer(name: str) -> list[str]:
            asked.append(name)
            return []

        monkeypatch.setattr(generator_members, "endpoints_at", no_answer)
        wait_until(lambda: len(asked) > 2, 20)
        assert set(pool.statuses()) == set(servers)
    finally:
        pool.close()
