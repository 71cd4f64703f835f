"""The lease in Redis: one holder at a time, increasing epochs, and a successor after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.lease import Lease
from quartet.errors import FailedPrecondition, LeadershipConflict
from tests.e2e.commands import ends


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def leases() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_epochs_increase_and_are_never_below_the_minimum(redis_client: Redis, redis_url: str, run: str) -> None:
    epochs = []
    for min_epoch in (1, 1, 7, 1):
        lease = Lease(redis_client, redis_url, run, min_epoch)
        epochs.append(lease.epoch)
        lease.release()
    assert epochs == [1, 2, 7, 8]


def test_a_renewed_lease_excludes_others_for_longer_than_its_duration(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=0.6)
    leases.callback(first.release)
    started = time.monotonic()
    with pytest.raises(FailedPrecondition, match="another orchestrator is its leader"):
        Lease(redis_client, redis_url, run, duration=0.6)
    assert time.monotonic() - started < 0.6
    time.sleep(1.0)
    first.check()
    with pytest.raises(FailedPrecondition):
        Lease(redis_client, redis_url, run, duration=0.6)


def test_the_lease_of_a_dead_leader_on_another_machine_expires(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    dead = Lease(redis_client, redis_url, run, duration=0.5)
    dead._ended.set()
    second = Lease(redis_client, redis_url, run, duration=0.5)
    leases.callback(second.release)
    assert second.epoch == dead.epoch + 1


def test_a_former_leader_notices_and_does_not_retake_the_lease(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=0.6)
    redis_client.delete(f"quartet:{run}:lease")
    second = Lease(redis_client, redis_url, run, duration=2.0)
    leases.callback(second.release)
    with pytest.raises(FailedPrecondition, match="the lease is lost"):
        first.check()
    first.release()
    with pytest.raises(FailedPrecondition):
        Lease(redis_client, redis_url, run, duration=2.0)


def test_a_suspended_leader_renews_an_expired_lease_without_a_successor(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=1.5)
    leases.callback(first.release)
    redis_client.delete(f"quartet:{run}:lease")
    first.check()
    with pytest.raises(LeadershipConflict):
        Lease(redis_client, redis_url, run, duration=1.5)


def test_a_lease_is_lost_if_redis_has_lost_its_epoch(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run)
    leases.callback(first.release)
    redis_client.delete(f"quartet:{run}:lease", f"quartet:{run}:epoch")
    with pytest.raises(FailedPrecondition, match="the lease is lost"):
        first.check()


def test_a_lease_of_the_same_owner_is_replaced_despite_a_late_renewal(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    first = Lease(redis_client, redis_url, run, duration=1.5, owner="me")
    first.release()
    first._ended.clear()
    first.check()  # Like a renewal that is sent before the release and arrives after it.
    start = time.monotonic()
    second = Lease(redis_client, redis_url, run, duration=1.5, owner="me")
    leases.callback(second.release)
    assert time.monotonic() - start < 30, "a process must not wait until its own lease expires"
    assert second.epoch == first.epoch + 1
    with pytest.raises(FailedPrecondition, match="the lease is lost"):
        first.check()


def test_a_lease_is_not_renewed_after_its_release(redis_client: Redis, redis_url: str, run: str) -> None:
    lease = Lease(redis_client, redis_url, run)
    lease.release()
    with pytest.raises(FailedPrecondition, match="the lease is lost"):
        lease.check()
    assert redis_client.get(f"quartet:{run}:lease") is None


def test_a_redis_that_does_not_respond_delays_the_release_by_a_limited_time(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.buffer.lease.RELEASE_SECONDS", 0.2)
    with EmbeddedRedis(tmp_path / "redis", tmp_path / "redis.log") as server:
        lease = Lease(connect(server.url), server.url, run)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            assert ends(lease.release, 5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


LEADER = """
import sys, time
from quartet.buffer.connection import connect
from quartet.buffer.lease import Lease
Lease(connect(sys.argv[1]), sys.argv[1], sys.argv[2], duration=3600.0)
print("leads", flush=True)
time.sleep(3600)
"""


def test_the_lease_of_a_dead_leader_on_this_machine_is_replaced_immediately(
    redis_client: Redis, redis_url: str, run: str, leases: ExitStack
) -> None:
    with subprocess.Popen([sys.executable, "-c", LEADER, redis_url, run], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "leads\n"
        leader.kill()
    second = Lease(redis_client, redis_url, run)
    leases.callback(second.release)
    assert second.epoch == 2
