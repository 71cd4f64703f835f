"""Oversized, repeated, stale and invalid messages: they are refused or recognised, and the run stays bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.errors import InvalidRequest
from quartet.rpc.clients import RewardClient
from quartet.rpc.limits import MAX_MESSAGE_BYTES
from quartet.rpc.security import credentials
from tests.faults.network import FAULT_STEP, SETTINGS
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, run_to_completion


def test_a_service_refuses_a_message_above_the_size_limit_and_continues(make: MakeConfig) -> None:
    config = make()
    with fleet(config) as services:
        address = services.config.services.reward.address
        assert address is not None
        # A client without a size limit.
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            score = channel.unary_unary("/quartet.v1.RewardService/Score", lambda data: data, lambda data: data)
            with pytest.raises(grpc.RpcError) as refused:
                score(bytes(MAX_MESSAGE_BYTES + 1), timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        client = RewardClient(address, config.timeouts)
        assert len(client.score(batch_of(2)).result().total) == 2
        client.close()


def test_a_client_neither_sends_nor_retries_a_message_above_the_size_limit(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A smaller limit takes the same code path.
    limit = {**dict(credentials.CHANNEL_OPTIONS), "grpc.max_send_message_length": 1_000_000}
    monkeypatch.setattr(credentials, "CHANNEL_OPTIONS", tuple(limit.items()))
    with fleet(make()) as services:
        address = services.config.services.reward.address
        assert address is not None
        client = RewardClient(address, services.config.timeouts)
        with pytest.raises(InvalidRequest, match=r"reward at .*: Score: .*larger than max"):
            client.score(batch_of(250_000)).result()
        client.close()


def batch_of(tokens: int) -> TokenBatch:
    """Return two sequences with about this many tokens together. Each prompt has one token."""
    half = tokens // 2 + 1
    return TokenBatch(np.ones(2 * half, np.int32), np.array([1, 1], np.int32), np.array([half - 1, half - 1], np.int32))


def test_trajectories_that_are_delivered_twice_are_trained_on_once(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    append = RolloutStream.append

    def twice(self: RolloutStream, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        # Each repeat comes before the next trajectory, while the step still waits.
        append(self, [trajectory for trajectory in trajectories for _ in range(2)], leader_epoch)

    monkeypatch.setattr(RolloutStream, "append", twice)
    config = make(**SETTINGS)
    run = run_to_completion(config)
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
    assert redis_client.xlen(f"quartet:{config.run.name}:rollouts") == 0


def append_stale(stream: RolloutStream, written: list[Trajectory], epoch: int, redis: Redis) -> None:
    stream.append([replace(written[0], policy_version=written[0].policy_version - 1)], epoch)


def append_invalid_bytes(stream: RolloutStream, written: list[Trajectory], epoch: int, redis: Redis) -> None:
    redis.xadd(stream.key, {"id": str(written[0].id), "trajectory": b"\xff\xff\xff", "leader_epoch": epoch})


def append_partial_entry(stream: RolloutStream, written: list[Trajectory], epoch: int, redis: Redis) -> None:
    redis.xadd(stream.key, {"id": str(written[0].id), "leader_epoch": epoch})


@pytest.mark.parametrize(
    ("append_unexpected", "message"),
    [
        (append_stale, "is of policy version 1 and digest none, requested were version 2"),
        (append_invalid_bytes, "not a trajectory"),
        (append_partial_entry, "not a trajectory"),
    ],
    ids=["a trajectory of an older policy version", "bytes that are no message", "an entry without its trajectory"],
)
def test_an_unexpected_entry_is_not_trained_on_and_the_step_is_repeated(
    append_unexpected: Callable[[RolloutStream, list[Trajectory], int, Redis], None],
    message: str,
    make: MakeConfig,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    original, pending = RolloutStream.append, [append_unexpected]

    def append(self: RolloutStream, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        written = list(trajectories)
        if pending and written[0].id.step == FAULT_STEP:
            pending.pop()(self, written, leader_epoch, redis_client)
        original(self, written, leader_epoch)

    monkeypatch.setattr(RolloutStream, "append", append)
    run = run_to_completion(make(**SETTINGS))
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 1
    assert any(message in note for note in run.progress.notes), run.progress.notes


def test_an_update_that_arrives_twice_is_applied_once(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quartet.services.orchestrator.algorithm import update_request

    start_update = update_request.start_update

    def twice(client: Any, *arguments: Any) -> Any:
        first = start_update(client, *arguments).result()
        second = start_update(client, *arguments)
        assert second.result() == first
        return second

    monkeypatch.setattr(update_request, "start_update", twice)
    assert_same(run_to_completion(make(**SETTINGS)), undisturbed)
