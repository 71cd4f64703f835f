"""The lease on a real server: one holder at a time, epochs that rise, a successor after a death."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.lease import Lease
from quartet.errors import FailedPrecondition


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def leases() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_epochs_rise_and_are_never_below_what_was_seen(redis_client: Redis, redis_url: str, run: str) -> None:
    epochs = []
    for at_least in (1, 1, 7, 1):
        lease = Lease(redis_client, redis_url, run, at_least)
        epochs.append(lease.epoch)
        lease.release()
    assert epochs == [1, 2, 7, 8]


def test_a_lease_that_is_renewed_is_refused_to_others_and_outlasts_its_duration(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=0.6)
    leases.callback(first.release)
    started = time.monotonic()
    with pytest.raises(FailedPrecondition, match="another orchestrator leads it"):
        Lease(redis_client, redis_url, run, duration=0.6)
    assert time.monotonic() - started < 0.6
    time.sleep(1.0)
    first.check()
    with pytest.raises(FailedPrecondition):
        Lease(redis_client, redis_url, run, duration=0.6)


def test_who_died_is_succeeded_after_the_duration(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    dead = Lease(redis_client, redis_url, run, duration=0.5)
    dead._ended.set()
    second = Lease(redis_client, redis_url, run, duration=0.5)
    leases.callback(second.release)
    assert second.epoch == dead.epoch + 1


def test_who_lost_the_lease_notices_and_does_not_take_it_from_its_successor(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=0.6)
    redis_client.delete(f"quartet:{run}:lease")
    second = Lease(redis_client, redis_url, run, duration=5.0)
    leases.callback(second.release)
    assert first._lost.wait(10)
    with pytest.raises(FailedPrecondition, match="the lease is lost"):
        first.check()
    first.release()
    with pytest.raises(FailedPrecondition):
        Lease(redis_client, redis_url, run, duration=5.0)
