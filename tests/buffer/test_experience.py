"""Sealed experience on a real server: whole, named, and an error when it is not."""

from __future__ import annotations

import pytest

from quartet import codec
from quartet.buffer.connection import Redis
from quartet.buffer.experience import ExperienceStore
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


@pytest.mark.parametrize("damage", [b"", b"\xff\xff\xff", b"cut"])
def test_damaged_experience_is_an_error_that_names_its_key(
    damage: bytes, store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    whole = codec.experience_to_bytes(experience(run, 1))
    redis_client.set(store.key(1), whole[:-5] if damage == b"cut" else damage)
    with pytest.raises(BufferFailed, match=r":experience:1: ") as refused:
        store.load(1)
    assert str(refused.value).startswith(store.key(1))


def test_experience_of_another_step_or_run_under_the_key_is_an_error(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    for wrong in (experience(run, 2), experience("other", 1)):
        redis_client.set(store.key(1), codec.experience_to_bytes(wrong))
        with pytest.raises(BufferFailed, match=f"holds step {wrong.step} of run {wrong.run}"):
            store.load(1)


def test_a_key_of_another_kind_is_an_error(store: ExperienceStore, redis_client: Redis) -> None:
    redis_client.rpush(store.key(1), b"x")
    with pytest.raises(BufferFailed, match="WRONGTYPE"):
        store.load(1)


def test_a_reset_frees_every_step_of_the_run_and_no_other(
    store: ExperienceStore, run: str, redis_client: Redis, redis_url: str
) -> None:
    other = ExperienceStore(redis_client, redis_url, f"{run}-other")
    other.seal(experience(f"{run}-other", 1))
    for step in (1, 2, 300):
        store.seal(experience(run, step))
    store.reset()
    assert list(redis_client.scan_iter(match=f"quartet:{run}:experience:*")) == []
    assert other.load(1).step == 1
