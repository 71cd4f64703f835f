"""The rollout stream in Redis: order, at-least-once delivery, and separate runs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from quartet.buffer.connection import Redis, connect
from quartet.buffer.rollout_stream import BLOCK_SECONDS, Delivery, RolloutStream
from quartet.codec.trajectories import trajectory_to_bytes
from quartet.errors import BufferFailed
from tests.buffer.samples import trajectory
from tests.waiting import LIMIT, wait_until


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def stream(redis_client: Redis, redis_url: str, run: str) -> RolloutStream:
    result = RolloutStream(redis_client, redis_url, run)
    result.reset()
    return result


def prompts(stream: RolloutStream, count: int = 100, block: float = 0.01) -> list[int]:
    return [delivery.trajectory.id.prompt for delivery in stream.read(count, block)]


def test_trajectories_are_read_in_the_order_of_their_append(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in (3, 1, 2)]
    stream.append(written[:2])
    stream.append(written[2:])
    read = [delivery.trajectory for delivery in stream.read(10, 0.01)]
    assert list(map(trajectory_to_bytes, read)) == list(map(trajectory_to_bytes, written))


def test_experts_survive_the_stream_to_the_same_bits(stream: RolloutStream, run: str) -> None:
    experts = np.random.default_rng(0).integers(0, 2**16, (4, 5, 3), np.uint16)
    stream.append([replace(trajectory(run, 1), routed_experts=experts)])
    (delivery,) = stream.read(10, 0.01)
    read = delivery.trajectory.routed_experts
    assert read is not None
    assert read.dtype == np.uint16
    assert np.array_equal(read, experts)


def test_each_entry_is_delivered_once_and_reads_are_limited_by_count(stream: RolloutStream, run: str) -> None:
    stream.append([trajectory(run, prompt) for prompt in range(5)])
    assert prompts(stream, 2) == [0, 1]
    assert prompts(stream, 2) == [2, 3]
    assert prompts(stream, 2) == [4]
    assert prompts(stream) == []


def test_entries_stay_until_they_are_acknowledged(stream: RolloutStream, run: str, redis_client: Redis) -> None:
    stream.append([trajectory(run, prompt) for prompt in range(3)])
    delivered = stream.read(10, 0.01)
    assert stream.depth() == 3
    assert redis_client.xpending(stream.key, "orchestrator")["pending"] == 3
    stream.acknowledge([delivery.entry_id for delivery in delivered[:2]])
    assert stream.depth() == 1
    assert redis_client.xpending(stream.key, "orchestrator")["pending"] == 1
    stream.acknowledge([])
    stream.acknowledge([delivery.entry_id for delivery in delivered])
    assert stream.depth() == 0


def test_a_trajectory_appended_twice_is_delivered_twice_with_the_same_id(stream: RolloutStream, run: str) -> None:
    for _ in range(2):
        stream.append([trajectory(run, 7)])
    first, second = stream.read(10, 0.01)
    assert first.entry_id != second.entry_id
    assert first.trajectory.id == second.trajectory.id


def test_a_read_without_block_returns_immediately(stream: RolloutStream) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert prompts(stream, block=0.0) == []
        seconds.append(time.perf_counter() - start)
    # Redis checks for ended waits only ten times a second. Without a wait, a read takes about 0.1 ms.
    assert min(seconds) < 0.02


def test_a_read_waits_for_the_first_entry(stream: RolloutStream, run: str, redis_url: str) -> None:
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(prompts, stream, 10, 30.0)
        writer = connect(redis_url)
        # The reader is blocked in the server before anything is written.
        while not any(client["cmd"] == "xreadgroup" for client in writer.client_list()):
            assert not reading.done()
        RolloutStream(writer, redis_url, run).append([trajectory(run, 4)])
        assert reading.result(timeout=LIMIT) == [4]
        writer.close()


def test_a_read_of_an_empty_stream_ends_after_its_timeout(stream: RolloutStream) -> None:
    start = time.monotonic()
    assert stream.read(10, 0.05) == []
    assert 0.04 <= time.monotonic() - start < 5


@pytest.mark.parametrize(
    "fields",
    [{"other": b"1"}, {"id": b"x", "trajectory": b""}, {"trajectory": b"\xff\xff"}, {"trajectory": b"\n\x02\n\x00"}],
)
def test_an_invalid_entry_is_an_error_with_its_id(
    fields: dict[str, bytes], stream: RolloutStream, redis_client: Redis
) -> None:
    entry = redis_client.xadd(stream.key, fields)
    with pytest.raises(BufferFailed, match=f"{entry.decode()}: not a trajectory"):
        stream.read(10, 0.01)


def test_a_reset_drops_entries_of_an_earlier_run(stream: RolloutStream, run: str) -> None:
    stream.append([trajectory(run, prompt) for prompt in range(3)])
    stream.read(1, 0.01)
    stream.reset()
    assert stream.depth() == 0
    assert prompts(stream) == []
    stream.append([trajectory(run, 9)])
    assert prompts(stream) == [9]


def test_a_stream_without_a_reset_is_an_error(redis_client: Redis, redis_url: str, run: str) -> None:
    with pytest.raises(BufferFailed, match="NOGROUP"):
        RolloutStream(redis_client, redis_url, run).read(1, 0.01)


def test_runs_have_separate_streams(stream: RolloutStream, redis_client: Redis, redis_url: str, run: str) -> None:
    other = RolloutStream(redis_client, redis_url, f"{run}-other")
    other.reset()
    other.append([trajectory(f"{run}-other", 1)])
    assert prompts(stream) == []
    stream.reset()
    assert prompts(other) == [1]


def test_the_stream_reads_with_either_protocol(redis_url: str, run: str) -> None:
    import redis

    for protocol in (2, 3):
        client = redis.Redis.from_url(redis_url, protocol=protocol)
        stream = RolloutStream(client, redis_url, run)
        stream.reset()
        stream.append([trajectory(run, prompt) for prompt in range(3)])
        assert prompts(stream) == [0, 1, 2]
        client.close()


def test_unacknowledged_deliveries_can_be_read_again(stream: RolloutStream, run: str) -> None:
    stream.append([trajectory(run, 1), trajectory(run, 2)])
    lost = stream.read(10, 0.1)
    assert stream.read(10, 0.0) == []
    redelivered = stream.delivered()
    assert [item.entry_id for item in redelivered] == [item.entry_id for item in lost]
    stream.acknowledge([lost[0].entry_id])
    assert [item.entry_id for item in stream.delivered()] == [lost[1].entry_id]


def test_a_listener_delivers_entries_as_they_arrive_up_to_its_count(stream: RolloutStream, run: str) -> None:
    events: SimpleQueue[list[Delivery] | Exception] = SimpleQueue()
    with stream.listen(2, events.put):
        stream.append([trajectory(run, prompt) for prompt in range(3)])
        received = list[int]()
        while len(received) < 3:
            event = events.get(timeout=LIMIT)
            assert isinstance(event, list)
            assert len(event) <= 2
            received += [delivery.trajectory.id.prompt for delivery in event]
        stream.append([trajectory(run, 3)])
        event = events.get(timeout=LIMIT)
        assert isinstance(event, list)
        assert [delivery.trajectory.id.prompt for delivery in event] == [3]
    assert received == [0, 1, 2]
    assert len(stream.delivered()) == 4


def test_a_listener_ends_at_once_and_can_start_again(stream: RolloutStream, run: str) -> None:
    events: SimpleQueue[list[Delivery] | Exception] = SimpleQueue()
    before, start = threading.active_count(), time.monotonic()
    # Some end before their first command, and some while it waits.
    for pause in (0.0, 0.001, 0.002, 0.005, 0.01, 0.05) * 3:
        with stream.listen(2, events.put):
            time.sleep(pause)
    assert time.monotonic() - start < BLOCK_SECONDS
    assert events.empty()
    assert wait_until(lambda: threading.active_count() <= before)
    with stream.listen(2, events.put):
        stream.append([trajectory(run, 1)])
        assert isinstance(events.get(timeout=LIMIT), list)


def test_a_listener_reports_its_error_last(stream: RolloutStream, run: str, redis_client: Redis) -> None:
    events: SimpleQueue[list[Delivery] | Exception] = SimpleQueue()
    with stream.listen(1, events.put):
        stream.append([trajectory(run, 1)])
        assert isinstance(events.get(timeout=LIMIT), list)
        redis_client.xadd(stream.key, {"trajectory": b"no trajectory"})
        error = events.get(timeout=LIMIT)
        assert isinstance(error, BufferFailed)
        assert "not a trajectory" in str(error)
        stream.append([trajectory(run, 2)])
    assert events.empty()


def test_a_listener_skips_entries_of_a_former_leader(stream: RolloutStream, run: str) -> None:
    stream.reset(3)
    events: SimpleQueue[list[Delivery] | Exception] = SimpleQueue()
    with stream.listen(5, events.put):
        stream.append([trajectory(run, 1)], leader_epoch=2)
        stream.append([trajectory(run, 2)], leader_epoch=3)
        event = events.get(timeout=LIMIT)
    assert isinstance(event, list)
    assert [delivery.trajectory.id.prompt for delivery in event] == [2]
