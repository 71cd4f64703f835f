"""Sealed experience on a real server: whole, named, and an error when it is not."""

from __future__ import annotations

import hashlib

import pytest

from quartet import codec
from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.errors import BufferFailed, FailedPrecondition
from tests.buffer.samples import experience


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def store(redis_client: Redis, redis_url: str, run: str) -> ExperienceStore:
    return ExperienceStore(redis_client, redis_url, run)


def test_sealed_experience_is_loaded_bit_for_bit_and_again(store: ExperienceStore, run: str) -> None:
    store.seal(experience(run, 4))
    for _ in range(2):
        assert codec.experience_to_bytes(store.load(4)) == codec.experience_to_bytes(experience(run, 4))


def test_experience_that_is_not_sealed_or_discarded_is_refused(store: ExperienceStore, run: str) -> None:
    store.seal(experience(run, 1))
    with pytest.raises(FailedPrecondition, match=f"experience of step 2 of run {run}: not in the buffer"):
        store.load(2)
    store.discard([1])
    store.discard([1])
    with pytest.raises(FailedPrecondition, match="experience of step 1"):
        store.load(1)


def put(client: Redis, key: str, data: bytes, digest: str | None = None) -> None:
    """A value as ``seal`` stores it, with the checksum of its own or another's bytes."""
    client.hset(key, mapping={"experience": data, "sha256": digest or hashlib.sha256(data).hexdigest()})


@pytest.mark.parametrize(
    ("damage", "checksum"),
    [(damage, checksum) for damage in ("empty", "garbage", "cut") for checksum in ("sealed", "found")]
    + [("bit", "sealed")],
)
def test_damaged_experience_is_an_error_that_names_its_key(
    damage: str, checksum: str, store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    whole = codec.experience_to_bytes(experience(run, 1))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    data = {"empty": b"", "garbage": b"\xff\xff\xff", "cut": whole[:-5], "bit": bytes(flipped)}[damage]
    put(redis_client, store.key(1), data, hashlib.sha256(whole).hexdigest() if checksum == "sealed" else None)
    with pytest.raises(BufferFailed, match=r":experience:1: ") as refused:
        store.load(1)
    assert str(refused.value).startswith(store.key(1))


def test_experience_of_another_step_or_run_under_the_key_is_an_error(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    for wrong in (experience(run, 2), experience("other", 1)):
        put(redis_client, store.key(1), codec.experience_to_bytes(wrong))
        with pytest.raises(BufferFailed, match=f"holds step {wrong.step} of run {wrong.run}"):
            store.load(1)


def test_a_key_of_another_kind_is_an_error(store: ExperienceStore, redis_client: Redis) -> None:
    redis_client.rpush(store.key(1), b"x")
    with pytest.raises(BufferFailed, match="WRONGTYPE"):
        store.load(1)


def test_what_is_not_kept_is_freed_and_nothing_of_another_run(
    store: ExperienceStore, run: str, redis_client: Redis, redis_url: str
) -> None:
    other = ExperienceStore(redis_client, redis_url, f"{run}-other")
    other.seal(experience(f"{run}-other", 1))
    for step in (1, 2, 300):
        store.seal(experience(run, step))
    store.keep_only(range(2, 4))
    assert list(redis_client.scan_iter(match=f"quartet:{run}:experience:*")) == [store.key(2).encode()]
    store.keep_only([])
    assert list(redis_client.scan_iter(match=f"quartet:{run}:experience:*")) == []
    assert other.load(1).step == 1
