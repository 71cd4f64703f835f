"""Turn records in Redis: the first writer wins, other origins are not seen, and the records of a step are forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quartet.buffer import turn_records
from quartet.buffer.connection import Redis, connect
from quartet.buffer.turn_records import TurnRecords, TurnRecordStore
from quartet.codec.turn_records import MAX_RECORD_BYTES, reply_to_bytes, turn_to_bytes
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import (
    EnvironmentReply,
    FinishReason,
    Segment,
    SegmentRole,
    TrajectoryId,
    VersionSpan,
)
from quartet.contract.turn_record import RecordedTurn, origins
from quartet.errors import BufferFailed, InvalidRequest, ServiceUnavailable
from tests.faults.proxy import Proxy

DIGEST = b"d" * 16


def batch(run: str, step: int = 3, prompts: int = 2) -> GenerationBatch:
    requests = [
        GenerationRequest(TrajectoryId(run, step, prompt, 0), np.array([prompt, 7], np.int32))
        for prompt in range(prompts)
    ]
    settings = EpisodeSettings(4, 5, {prompt: f'{{"n": {prompt}}}' for prompt in range(prompts)})
    return GenerationBatch(run, step, 1, requests, SamplingParameters(20), 9, step - 1, DIGEST, episode=settings)


def turn(index: int, first: int = 1) -> RecordedTurn:
    tokens = np.arange(first, first + 3, dtype=np.int32)
    segment = Segment(SegmentRole.POLICY, tokens, -np.arange(3, dtype=np.float32), 2)
    spans = (VersionSpan(1, DIGEST, 1), VersionSpan(2, DIGEST, 2))
    return RecordedTurn(index, segment, 2, DIGEST, FinishReason.EOS, spans, 1_800_000_000, b"r" * 32, '{"text": "a"}')


def reply(number: int, done: bool = False) -> EnvironmentReply:
    return EnvironmentReply(np.array([number, 5], np.int32), 0.5 * number, done)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def store(redis_client: Redis, redis_url: str, run: str) -> TurnRecordStore:
    return TurnRecordStore(redis_client, redis_url, run)


@pytest.fixture
def records(store: TurnRecordStore, run: str) -> TurnRecords:
    return store.records_of(batch(run))


def id_of(run: str, prompt: int = 0, step: int = 3) -> TrajectoryId:
    return TrajectoryId(run, step, prompt, 0)


def test_turns_and_replies_are_read_as_they_were_written(records: TurnRecords, run: str) -> None:
    assert records.load(id_of(run)) == turn_records.EpisodeRecord()
    for index in range(11):
        assert records.append_reply(id_of(run), index, reply(index))
        assert records.append(id_of(run), turn(index, first=index))
    loaded = records.load(id_of(run))
    assert [*map(turn_to_bytes, loaded.turns)] == [turn_to_bytes(turn(index, first=index)) for index in range(11)]
    assert [*map(reply_to_bytes, loaded.replies)] == [reply_to_bytes(reply(index)) for index in range(11)]
    assert records.load(id_of(run, prompt=1)).turns == ()


def test_only_the_last_reply_keeps_its_state(records: TurnRecords, run: str, redis_client: Redis) -> None:
    for number in range(3):
        assert records.append_reply(id_of(run), number, replace(reply(number), state=f"s{number}"))
        assert [each.state for each in records.load(id_of(run)).replies] == [*[""] * number, f"s{number}"]
    assert records.append_reply(id_of(run), 2, replace(reply(2), state="s2")), "the same again"
    (key,) = redis_client.scan_iter(f"quartet:{run}:turns:*/*")
    names = sorted(name.decode().partition("/")[2] for name in redis_client.hkeys(key))
    assert names == ["reply/0", "reply/1", "reply/2", "state/2"]
    # The last reply may be one that has none.
    records.append_reply(id_of(run), 3, reply(3, done=True))
    assert records.load(id_of(run)).replies[-1].state == ""


def test_a_turn_without_log_probs_and_spans_is_read_as_written(records: TurnRecords, run: str) -> None:
    bare = RecordedTurn(0, Segment(SegmentRole.POLICY, np.array([4], np.int32)), 0, b"", FinishReason.LENGTH)
    records.append(id_of(run), bare)
    (loaded,) = records.load(id_of(run)).turns
    assert turn_to_bytes(loaded) == turn_to_bytes(bare)
    assert len(loaded.segment.log_probs) == 0


def test_the_first_writer_of_a_turn_wins(records: TurnRecords, store: TurnRecordStore, run: str) -> None:
    other = store.records_of(batch(run))
    assert records.append(id_of(run), turn(0))
    assert records.append(id_of(run), turn(0)), "the same turn again is no conflict"
    assert not other.append(id_of(run), turn(0, first=5))
    assert not other.append(id_of(run), replace(turn(0), created=1))
    assert other.load(id_of(run)).turns[0].segment.token_ids.tolist() == [1, 2, 3]
    assert records.append_reply(id_of(run), 0, reply(0))
    assert not other.append_reply(id_of(run), 0, reply(1))


def test_turns_after_a_gap_are_not_returned(records: TurnRecords, run: str) -> None:
    for index in (0, 2, 3):
        records.append(id_of(run), turn(index))
    assert [each.index for each in records.load(id_of(run)).turns] == [0]


def changed(original: GenerationBatch, what: str) -> GenerationBatch:
    """Return a batch that leads to other turns."""
    first, *rest = original.requests
    assert original.episode is not None
    return {
        "version": replace(original, policy_version=8),
        "digest": replace(original, weights_digest=b"e" * 16),
        "seed": replace(original, seed=10),
        "sampling": replace(original, sampling=SamplingParameters(20, temperature=0.5)),
        "turns": replace(original, episode=replace(original.episode, max_turns=5)),
        "fields": replace(original, episode=replace(original.episode, fields={0: '{"n": 9}'})),
        "prompt": replace(original, requests=[replace(first, prompt_ids=np.array([0, 8], np.int32)), *rest]),
        "greedy": replace(original, requests=[replace(first, greedy=True), *rest]),
    }[what]


def test_revoked_records_are_removed_also_those_that_another_thread_writes_meanwhile(
    records: TurnRecords, store: TurnRecordStore, run: str
) -> None:
    records.append(id_of(run), turn(0))
    records.revoke()
    # It was submitted before.
    assert records.append(id_of(run), turn(0))
    assert store.records_of(batch(run)).load(id_of(run)).turns == ()
    # Another process generates the trajectory meanwhile.
    assert store.records_of(batch(run)).append(id_of(run), turn(0))
    records.append(id_of(run), turn(0))
    assert len(store.records_of(batch(run)).load(id_of(run)).turns) == 1


@pytest.mark.parametrize("what", ["version", "digest", "seed", "sampling", "turns", "fields", "prompt", "greedy"])
def test_records_of_another_origin_are_removed(
    what: str, records: TurnRecords, store: TurnRecordStore, run: str
) -> None:
    records.append(id_of(run), turn(0))
    other = store.records_of(changed(batch(run), what))
    assert other.load(id_of(run)).turns == ()
    assert records.load(id_of(run)).turns == ()


def test_the_caller_of_a_request_does_not_change_its_origin(run: str) -> None:
    original = batch(run)
    again = replace(original, leader_epoch=5, attempt=7, generator="other:1", requests=original.requests[:1])
    assert origins(again)[id_of(run)] == origins(original)[id_of(run)]


def test_forgotten_episodes_have_no_records(records: TurnRecords, run: str, redis_client: Redis) -> None:
    for prompt in (0, 1):
        records.append(id_of(run, prompt), turn(0))
    records.forget([id_of(run)])
    assert records.load(id_of(run)).turns == ()
    assert len(records.load(id_of(run, 1)).turns) == 1
    records.forget([])


def test_a_step_is_forgotten_with_all_its_episodes_and_no_other_step(
    store: TurnRecordStore, run: str, redis_client: Redis
) -> None:
    for step in (3, 4, 30):
        for prompt in (0, 1):
            store.records_of(batch(run, step)).append(id_of(run, prompt, step), turn(0))
    store.forget_step(3)
    keys = sorted(key.decode() for key in redis_client.scan_iter(f"quartet:{run}:*"))
    assert keys == sorted(f"quartet:{run}:turns:{name}" for name in ("4", "4/0/0", "4/1/0", "30", "30/0/0", "30/1/0"))
    store.forget_step(5)
    store.forget_before(30)
    assert {key.decode().rpartition(":")[2][:2] for key in redis_client.scan_iter(f"quartet:{run}:*")} == {"30"}
    store.forget_all()
    assert list(redis_client.scan_iter(f"quartet:{run}:*")) == []


def test_records_expire_as_a_last_resort(records: TurnRecords, run: str, redis_client: Redis) -> None:
    records.append(id_of(run), turn(0))
    keys = list(redis_client.scan_iter(f"quartet:{run}:*"))
    assert len(keys) == 2
    for key in keys:
        assert 0 < redis_client.ttl(key) <= turn_records.LIFETIME_SECONDS


def test_a_turn_that_is_too_large_is_refused(records: TurnRecords, run: str) -> None:
    huge = replace(turn(0), details="a" * MAX_RECORD_BYTES)
    with pytest.raises(InvalidRequest, match=r"recorded turn 0: 16,777,3.* bytes, expected at most 16,777,216"):
        records.append(id_of(run), huge)
    assert records.load(id_of(run)).turns == ()


def test_the_records_of_an_episode_with_a_damaged_one_are_dropped(
    records: TurnRecords, run: str, redis_client: Redis
) -> None:
    records.append(id_of(run), turn(0))
    (key,) = redis_client.scan_iter(f"quartet:{run}:turns:*/*")
    (field,) = redis_client.hkeys(key)
    redis_client.hset(key, field, b"\xff")
    assert records.load(id_of(run)).turns == ()
    assert not redis_client.exists(key)


def test_a_full_server_is_an_error(records: TurnRecords, run: str, redis_client: Redis) -> None:
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BufferFailed, match="is full; raise its maxmemory"):
            records.append(id_of(run), turn(0))
    finally:
        redis_client.config_set("maxmemory", 0)


def test_a_turn_is_recorded_once_a_server_that_was_away_is_back(redis_url: str, run: str) -> None:
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        url = f"redis://{proxy.address}/0"
        client = connect(url)
        losses: list[int] = []

        def lost() -> None:
            losses.append(1)
            proxy.heal()

        records = TurnRecordStore(client, url, run, lost).records_of(batch(run))
        proxy.reset()
        assert records.append(id_of(run), turn(0))
        assert losses == [1]
        assert len(records.load(id_of(run)).turns) == 1


def test_a_server_that_stays_away_is_an_error(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_records, "CLOSE_SECONDS", 0.0)
    with Proxy(redis_url.removeprefix("unix://")) as proxy:
        url = f"redis://{proxy.address}/0"
        records = TurnRecordStore(connect(url), url, run).records_of(batch(run))
        records.close()
        proxy.reset()
        with pytest.raises(ServiceUnavailable, match="unreachable"):
            records.append(id_of(run), turn(0))
