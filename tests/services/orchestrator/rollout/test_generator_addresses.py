"""The generators of a pool follow the addresses behind a host name, as replicas are added and removed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quartet.config.deployment import TimeoutsConfig
from quartet.config.loading import parse_config
from quartet.contract.generation import EngineProperties
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import QuartetError
from quartet.rpc import replica_set
from quartet.rpc.clients import GenerationClient
from quartet.rpc.server import Server
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.orchestrator.rollout.generator_work import RemoteGenerator
from tests.e2e.commands import ends
from tests.waiting import LIMIT, wait_until


class IdleGenerator:
    """A generator that only reports its status."""

    role = Role.GENERATOR

    def register(self, server: grpc.Server) -> None:
        pass

    def status(self) -> ServiceStatus:
        engine = EngineProperties("torch", True, True, "whole", "tensors", "read back")
        return ServiceStatus(Role.GENERATOR, dtype="float32", vocabulary_size=64, engine=engine)

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


class IdleActor:
    """The actor of a run in which nothing is generated."""

    channel = SimpleNamespace(tracer=None)

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.ACTOR, vocabulary_size=64)


def acquire(lock: Any) -> None:
    with lock:
        pass


def pool_of(tree: dict[str, Any]) -> GeneratorPool:
    actor: Any = IdleActor()
    return GeneratorPool(parse_config(tree, "test"), actor, lambda note: None)


def far_generators(*addresses: str) -> dict[str, Any]:
    return {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "buffer": {"url": "redis://far"},
        "services": {"generators": list(addresses)},
    }


def test_a_generator_that_hangs_does_not_delay_the_others(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "SETTLE_SECONDS", 0.5)
    with ExitStack() as stack:
        # They accept connections, and never respond.
        hanging = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in hanging]
        pool = pool_of(far_generators(*addresses, *servers))
        stack.callback(pool.close)
        # One after the other, they would take 2 seconds each.
        pool.wait_until_ready(LIMIT)
        wait_until(lambda: set(pool.statuses()) == set(servers))


def test_a_run_begins_with_all_generators_that_respond(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "SETTLE_SECONDS", 20.0)
    with ExitStack() as stack:
        slow = IdleGenerator()
        slow.status = lambda: (Event().wait(0.5), IdleGenerator().status())[1]  # type: ignore[method-assign]
        server = Server([slow], "127.0.0.1:0")
        stack.callback(server.stop, 0)
        pool = pool_of(far_generators(*servers, server.address))
        stack.callback(pool.close)
        pool.wait_until_ready(LIMIT)
        assert set(pool.statuses()) == {*servers, server.address}


def test_closing_ends_all_calls_in_progress() -> None:
    answered = Event()
    slow = IdleGenerator()
    slow.status = lambda: (answered.wait(LIMIT), IdleGenerator().status())[1]  # type: ignore[method-assign]
    server = Server([slow], "127.0.0.1:0")
    pool = pool_of(far_generators(server.address))
    client = GenerationClient(server.address, TimeoutsConfig())
    pool._by_address[server.address] = RemoteGenerator(client)
    calls = [client.start_status() for _ in range(4)]
    for call in calls:
        # As the callbacks of the pool do. gRPC runs all of them in one thread.
        call.add_done_callback(lambda _: acquire(pool.lock))
    closed = ends(pool.close, 20)
    answered.set()
    server.stop(0)
    assert closed
    for call in calls:
        with pytest.raises(QuartetError, match="cancelled"):
            call.result()


def test_the_monitor_survives_an_unexpected_error(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "RESOLVE_SECONDS", 0.02)
    errors = [OSError("no name server"), ValueError("no port")]

    def endpoints_at(address: str) -> list[str]:
        if errors:
            raise errors.pop()
        return [address]

    monkeypatch.setattr(replica_set, "endpoints_at", endpoints_at)
    pool = pool_of(far_generators(servers[0]))
    try:
        pool.wait_until_ready(LIMIT)
        assert not errors
    finally:
        pool.close()


def test_replicas_join_and_leave_with_the_addresses_of_their_name(
    servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_set, "RESOLVE_SECONDS", 0.02)
    monkeypatch.setattr(replica_set, "CHECK_SECONDS", 0.02)
    resolved = servers[:1]
    monkeypatch.setattr(replica_set, "endpoints_at", lambda _: list(resolved))
    pool = pool_of(far_generators("generator:50051"))
    try:
        pool.wait_until_ready(LIMIT)
        assert set(pool.statuses()) == {servers[0]}
        resolved[:] = servers[1:]
        wait_until(lambda: set(pool.statuses()) == set(servers[1:]))
        resolved[:] = servers
        wait_until(lambda: set(pool.statuses()) == set(servers))
        # A name server that does not respond takes no generator away.
        asked: list[str] = []

        def no_answer(name: str) -> list[str]:
            asked.append(name)
            return []

        monkeypatch.setattr(replica_set, "endpoints_at", no_answer)
        wait_until(lambda: len(asked) > 2)
        assert set(pool.statuses()) == set(servers)
    finally:
        pool.close()
