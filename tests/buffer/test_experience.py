"""Sealed experience in Redis: written in chunks, read back bit-identically, and checked for damage."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.codec.checks import MAX_RESPONSE_TOKENS
from quartet.codec.experience import EXPERIENCE_CHUNK_BYTES, encode_experience
from quartet.config.rollout import MAX_RESPONSES
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.errors import BufferFailed, ConfigError, FailedPrecondition
from tests.buffer.samples import experience

REDIS_VALUE_BYTES = 512 * 2**20
"""The largest value that Redis allows by default (proto-max-bulk-len)."""


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", ".").replace("]", "")  # Only characters of a run name.


@pytest.fixture
def store(redis_client: Redis, redis_url: str, run: str) -> ExperienceStore:
    return ExperienceStore(redis_client, redis_url, run)


def keys(client: Redis, run: str) -> set[str]:
    """Return the keys of the experience of a run."""
    return {key.decode() for key in client.scan_iter(match=f"quartet:{run}:experience:*", count=1000)}


def same(left: Experience, right: Experience) -> bool:
    """Return whether two experiences are bit-identical."""
    return encode_experience(left) == encode_experience(right)


def large_experience(run: str, sequences: int, response: int) -> Experience:
    """Experience of ``sequences`` responses of ``response`` tokens each, with random numbers."""
    rng = np.random.default_rng(0)
    lengths = np.full(sequences, response, np.int32)
    arrays = [rng.random(sequences * response, np.float32) for _ in range(6)]
    return Experience(
        run,
        1,
        0,
        tuple(f"{run}/1/{index}/0" for index in range(sequences)),
        TokenBatch(rng.integers(0, 9, sequences * (response + 1), np.int32), np.ones(sequences, np.int32), lengths),
        rng.random(sequences, np.float32),
        *arrays,
    )


def test_sealed_experience_can_be_loaded_any_number_of_times(store: ExperienceStore, run: str) -> None:
    store.seal(experience(run, 4))
    for _ in range(2):
        assert same(store.load(4), experience(run, 4))


@pytest.mark.parametrize("chunk_bytes", [8192, 8195])
def test_no_redis_value_is_larger_than_the_chunk_size(
    chunk_bytes: int, redis_client: Redis, redis_url: str, run: str
) -> None:
    store = ExperienceStore(redis_client, redis_url, run, chunk_bytes=chunk_bytes)
    large = large_experience(run, 20, 900)
    store.seal(large)
    sizes = [redis_client.hstrlen(key, name) for key in keys(redis_client, run) for name in redis_client.hkeys(key)]
    assert max(sizes) == chunk_bytes
    assert len(sizes) > 60
    assert same(store.load(1), large)
    # Another process may use another chunk size.
    assert same(ExperienceStore(redis_client, redis_url, run).load(1), large)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_survive_redis_to_the_same_bits(dtype: type, redis_client: Redis, redis_url: str, run: str) -> None:
    store = ExperienceStore(redis_client, redis_url, run, chunk_bytes=8195)
    large = large_experience(run, 20, 90)
    experts = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, (1800, 3, 2), dtype)
    store.seal(replace(large, batch=replace(large.batch, routed_experts=experts)))
    read = store.load(1).batch.routed_experts
    assert read is not None
    assert read.dtype == dtype
    assert np.array_equal(read, experts)
    assert same(store.load(1, for_policy=False), large)


def test_the_largest_step_has_values_far_below_the_limit_of_redis() -> None:
    # As many chunks as with 1,048,576 tokens per response, each at 1/65,536 of the size.
    scale = 65_536
    response = MAX_RESPONSE_TOKENS // scale
    large = large_experience("n" * 64, MAX_RESPONSES, response)
    encoded = encode_experience(large, EXPERIENCE_CHUNK_BYTES // scale)
    assert len(encoded.chunks) > 6 * 4096
    assert len(encoded.manifest) < 16 * 2**20 < EXPERIENCE_CHUNK_BYTES < REDIS_VALUE_BYTES


def test_a_step_whose_manifest_is_too_large_is_refused_and_leaves_nothing(
    redis_client: Redis, redis_url: str, run: str
) -> None:
    store = ExperienceStore(redis_client, redis_url, run, chunk_bytes=2048)
    store.seal(large_experience(run, 2, 2))
    with pytest.raises(
        ConfigError,
        match=r"experience of step 1: the manifest of its 100 sequences has [\d,]+ bytes, expected at most 2,048",
    ):
        store.seal(large_experience(run, 100, 2))
    assert same(store.load(1), large_experience(run, 2, 2))


def test_a_step_without_a_manifest_is_not_sealed_and_keep_only_removes_its_chunks(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    for step in (1, 2):
        store.seal(experience(run, step))
    redis_client.delete(store.key(2))
    assert not store.holds([2])
    assert store.steps() == [1]
    with pytest.raises(FailedPrecondition, match="not in the buffer"):
        store.load(2)
    store.keep_only([1, 2])
    assert keys(redis_client, run) == {store.key(1), store.chunks_key(1)}


def test_sealing_a_step_again_replaces_it_and_leaves_no_other_chunk(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    store.seal(experience(run, 1))
    changed = replace(experience(run, 1), scores=np.array([2.0, 3.0], np.float32))
    for new in (changed, changed, experience(run, 1)):
        store.seal(new)
        assert same(store.load(1), new)
        names = {name.decode() for name in redis_client.hkeys(store.chunks_key(1))}
        assert names == set(encode_experience(new).chunks)


def test_an_interrupted_seal_leaves_the_former_experience_intact(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    store.seal(experience(run, 1))
    changed = encode_experience(replace(experience(run, 1), scores=np.array([2.0, 3.0], np.float32)))
    for name, chunk in changed.chunks.items():
        redis_client.hset(store.chunks_key(1), name, chunk)  # type: ignore[arg-type]
    assert same(store.load(1), experience(run, 1))


def test_missing_or_discarded_experience_cannot_be_loaded(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    store.seal(experience(run, 1))
    with pytest.raises(FailedPrecondition, match=f"experience of step 2 of run {run}: not in the buffer"):
        store.load(2)
    store.discard([1])
    store.discard([1])
    with pytest.raises(FailedPrecondition, match="experience of step 1"):
        store.load(1)
    assert keys(redis_client, run) == set()


def put_manifest(client: Redis, key: str, manifest: bytes, digest: str | None = None) -> None:
    """Store a manifest like ``seal``, with its SHA-256 or with ``digest``."""
    client.hset(key, mapping={"manifest": manifest, "sha256": digest or hashlib.sha256(manifest).hexdigest()})


@pytest.mark.parametrize(
    ("damage", "checksum"),
    [(damage, checksum) for damage in ("empty", "garbage", "cut") for checksum in ("sealed", "own")]
    + [("bit", "sealed")],
)
def test_a_damaged_manifest_is_an_error_that_names_its_key(
    damage: str, checksum: str, store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    encoded = encode_experience(experience(run, 1))
    store.seal(experience(run, 1))
    manifest = encoded.manifest
    flipped = bytearray(manifest)
    flipped[len(manifest) // 2] ^= 1
    data = {"empty": b"", "garbage": b"\xff\xff\xff", "cut": manifest[:-5], "bit": bytes(flipped)}[damage]
    put_manifest(
        redis_client, store.key(1), data, hashlib.sha256(manifest).hexdigest() if checksum == "sealed" else None
    )
    with pytest.raises(BufferFailed, match=r":experience:1: ") as error:
        store.load(1)
    assert str(error.value).startswith(store.key(1))
    assert (checksum == "sealed") == ("does not match its SHA-256" in str(error.value))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "bit"])
def test_a_damaged_chunk_is_an_error_that_names_its_key_and_array(
    damage: str, store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    store.seal(experience(run, 1))
    chunk = experience(run, 1).advantages.tobytes()
    name = hashlib.sha256(chunk).hexdigest()
    if damage == "missing":
        redis_client.hdel(store.chunks_key(1), name)
    else:
        data = {"empty": b"", "cut": chunk[:-1], "bit": bytes([chunk[0] ^ 1]) + chunk[1:]}[damage]
        redis_client.hset(store.chunks_key(1), name, data)
    with pytest.raises(BufferFailed, match=r":experience:1: experience\.advantages: chunk 0 of 1 "):
        store.load(1)
    store.seal(experience(run, 1))
    assert same(store.load(1), experience(run, 1))


def test_experience_of_another_step_or_run_under_the_key_is_an_error(
    store: ExperienceStore, run: str, redis_client: Redis
) -> None:
    store.seal(experience(run, 1))
    for wrong in (experience(run, 2), experience("other", 1)):
        encoded = encode_experience(wrong)
        put_manifest(redis_client, store.key(1), encoded.manifest)
        for name, chunk in encoded.chunks.items():
            redis_client.hset(store.chunks_key(1), name, chunk)  # type: ignore[arg-type]
        with pytest.raises(BufferFailed, match=f"holds step {wrong.step} of run {wrong.run}"):
            store.load(1)


def test_a_key_of_another_kind_is_an_error(store: ExperienceStore, redis_client: Redis) -> None:
    redis_client.rpush(store.key(1), b"x")
    with pytest.raises(BufferFailed, match="WRONGTYPE"):
        store.load(1)


def test_keep_only_removes_other_steps_of_this_run_only(
    store: ExperienceStore, run: str, redis_client: Redis, redis_url: str
) -> None:
    other = ExperienceStore(redis_client, redis_url, f"{run}-other")
    other.seal(experience(f"{run}-other", 1))
    for step in (1, 2, 300):
        store.seal(experience(run, step))
    assert store.steps() == [1, 2, 300]
    store.keep_only(range(2, 4))
    assert keys(redis_client, run) == {store.key(2), store.chunks_key(2)}
    store.keep_only([])
    assert keys(redis_client, run) == set()
    assert other.load(1).step == 1
