"""Sources, mirrors and the streams between them: windows, deltas, faults and concurrent publication."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidRequest,
    NoResponse,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.weight_transfer.digests import combined_digest
from quartet.weight_transfer.messages import (
    CHUNK_BYTES,
    MESSAGE_DATA,
    Chunk,
    Encoding,
    Manifest,
    Message,
    WeightsRequest,
    grouped,
)
from quartet.weight_transfer.receiver import PulledWeights, WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor
from tests.unit.weight_transfer.samples import (
    LocalPeer,
    Tensors,
    assert_equal,
    changed,
    cut_after,
    digest,
    tensor,
    weights,
)

RUN = "run"
GONE = ServiceUnavailable("actor at local: unavailable")


@pytest.fixture
def source() -> Iterator[WeightSource]:
    source = WeightSource(capacity=3, num_threads=2)
    yield source
    source.close()


@pytest.fixture
def mirror() -> Iterator[WeightMirror]:
    mirror = WeightMirror(num_threads=2)
    yield mirror
    mirror.close()


def history(count: int) -> list[Tensors]:
    """Return the weights of versions 0 to ``count`` - 1."""
    versions = [weights()]
    for number in range(1, count):
        versions.append(changed(versions[-1], number, 0.02 * number))
    return versions


def pull(
    mirror: WeightMirror, source: WeightSource | WeightMirror | LocalPeer, version: int, tensors: Tensors
) -> PulledWeights:
    peer = source if isinstance(source, LocalPeer) else LocalPeer(source)
    return mirror.pull([peer], RUN, version, digest(tensors), timeout=20)


def test_a_mirror_takes_everything_then_deltas(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(4)
    results = []
    for number, tensors in enumerate(versions):
        assert source.publish(number, tensors, run=RUN) == digest(tensors)
        results.append(pull(mirror, source, number, tensors))
        assert_equal(results[-1].weight_set, tensors)
        assert results[-1].weight_set.version == number
        assert combined_digest(mirror.tensor_digests()) == digest(tensors)
    assert [result.kind for result in results] == ["full", "delta", "delta", "delta"]
    total = sum(each.data.nbytes for each in versions[0].values())
    assert results[0].bytes_received == total
    assert results[1].bytes_received < total / 8
    assert results[0].changed == frozenset(versions[0])
    assert results[1].changed >= {"model.embed.weight", "model.proj.weight"}
    assert "model.empty" not in results[1].changed
    assert source.last is not None
    assert source.last.delta_bytes == results[-1].bytes_received


def test_only_changed_tensors_are_sent(source: WeightSource, mirror: WeightMirror) -> None:
    before = weights()
    after = changed(before, 1, 0.5, "model.proj.weight")
    source.publish(0, before, run=RUN)
    pull(mirror, source, 0, before)
    source.publish(1, after, run=RUN)
    assert pull(mirror, source, 1, after).changed == {"model.proj.weight"}
    assert_equal(mirror.weight_set(), after)


def test_the_held_version_is_not_sent_again(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    source.publish(0, tensors, run=RUN)
    peer = LocalPeer(source)
    pull(mirror, peer, 0, tensors)
    again = pull(mirror, peer, 0, tensors)
    assert (again.kind, again.changed, again.bytes_received, len(peer.requests)) == ("held", frozenset(), 0, 1)


def test_every_version_in_the_window_is_sent_as_everything_and_against_any_other(source: WeightSource) -> None:
    versions = history(5)
    for number, tensors in enumerate(versions):
        source.publish(number, tensors, run=RUN)
    assert source.versions == (2, 3, 4)
    for held in source.versions:
        for wanted in source.versions:
            mirror = WeightMirror(num_threads=1)
            assert pull(mirror, source, held, versions[held]).kind == "full"
            assert_equal(mirror.weight_set(), versions[held])
            result = pull(mirror, source, wanted, versions[wanted])
            assert result.kind == ("held" if held == wanted else "delta")
            assert_equal(mirror.weight_set(), versions[wanted])
            mirror.close()


def test_a_version_outside_the_window_is_refused_with_the_versions_in_it(
    source: WeightSource, mirror: WeightMirror
) -> None:
    versions = history(4)
    for number, tensors in enumerate(versions):
        source.publish(number, tensors, run=RUN)
    with pytest.raises(FailedPrecondition, match=r"no version 0 .*newest versions of run 'run': 1 .*, 2 .*, 3 "):
        pull(mirror, source, 0, versions[0])
    with pytest.raises(FailedPrecondition, match="no version 3"):
        mirror.pull([LocalPeer(source)], RUN, 3, bytes(16), timeout=5)
    with pytest.raises(FailedPrecondition, match="of run 'other'"):
        mirror.pull([LocalPeer(source)], "other", 3, digest(versions[3]), timeout=5)
    assert source.digest_of(0) is None
    assert source.digest_of(3) == digest(versions[3])


def test_a_receiver_outside_the_window_takes_everything(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(5)
    source.publish(0, versions[0], run=RUN)
    pull(mirror, source, 0, versions[0])
    for number in range(1, 5):
        source.publish(number, versions[number], run=RUN)
    assert pull(mirror, source, 4, versions[4]).kind == "full"
    assert_equal(mirror.weight_set(), versions[4])


def test_everything_is_sent_if_the_delta_is_not_smaller(source: WeightSource, mirror: WeightMirror) -> None:
    versions = [weights(seed) for seed in (0, 10, 20)]
    for number, tensors in enumerate(versions):
        source.publish(number, tensors, run=RUN)
    pull(mirror, source, 0, versions[0])
    assert pull(mirror, source, 2, versions[2]).kind == "full"
    assert_equal(mirror.weight_set(), versions[2])


def test_publishing_the_same_weights_again_changes_nothing(source: WeightSource) -> None:
    tensors = weights()
    first = source.publish(0, tensors, run=RUN)
    assert source.publish(0, tensors, run=RUN) == first
    assert source.versions == (0,)
    # The same weights under another number: an update with no effect.
    source.publish(1, tensors, run=RUN)
    assert source.versions == (0, 1)
    assert source.last is not None
    assert (source.last.changed_tensors, source.last.delta_bytes) == (0, 0)


def test_a_tensor_that_changed_and_changed_back_is_not_sent(source: WeightSource, mirror: WeightMirror) -> None:
    before = weights()
    between = changed(before, 1, 0.1, "model.proj.weight")
    after = changed(before, 2, 0.1, "model.norm.weight")
    for number, tensors in enumerate((before, between, after)):
        source.publish(number, tensors, run=RUN)
    pull(mirror, source, 0, before)
    result = pull(mirror, source, 2, after)
    assert (result.kind, result.changed) == ("delta", {"model.norm.weight"})
    assert_equal(result.weight_set, after)


def test_the_run_may_become_known_after_the_first_version(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(2)
    source.publish(0, versions[0])
    assert pull(mirror, source, 0, versions[0]).kind == "full"
    source.publish(1, versions[1], run=RUN)
    assert pull(mirror, source, 1, versions[1]).kind == "delta"


def test_another_run_or_other_shapes_forget_earlier_versions(source: WeightSource) -> None:
    source.publish(0, weights(), run=RUN)
    source.publish(1, {"only": tensor((3, 5))}, run=RUN)
    assert source.versions == (1,)
    source.publish(1, {"only": tensor((3, 5))}, run="other")
    assert source.versions == (1,)
    assert source.digest_of(1) == digest({"only": tensor((3, 5))})


def test_a_repeated_version_number_after_a_rollback_has_its_new_weights(
    source: WeightSource, mirror: WeightMirror
) -> None:
    before, abandoned, after = weights(), changed(weights(), 1), changed(weights(), 2)
    source.publish(1, before, run=RUN)
    source.publish(2, abandoned, run=RUN)
    pull(mirror, source, 2, abandoned)
    source.publish(2, after, run=RUN)
    assert pull(mirror, source, 2, after).kind == "delta"
    assert_equal(mirror.weight_set(), after)
    source.reset()
    assert source.versions == ()
    source.publish(1, before, run=RUN)
    assert pull(mirror, source, 1, before).kind == "full"
    assert_equal(mirror.weight_set(), before)


def test_the_adapter_settings_arrive(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    source.publish(0, tensors, AdapterSettings(8, 16.0, ("q_proj", "v_proj")), RUN)
    assert pull(mirror, source, 0, tensors).weight_set.adapter == AdapterSettings(8, 16.0, ("q_proj", "v_proj"))
    after = changed(tensors, 1)
    source.publish(1, after, AdapterSettings(8, 32.0, ("q_proj",)), RUN)
    assert pull(mirror, source, 1, after).weight_set.adapter == AdapterSettings(8, 32.0, ("q_proj",))


def test_published_weights_are_copied(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    expected = digest(tensors)
    source.publish(0, tensors, run=RUN)
    for each in tensors.values():
        each.data[:] = 0
    assert mirror.pull([LocalPeer(source)], RUN, 0, expected, timeout=5).weight_set.digest == expected


def test_bytes_that_do_not_fit_the_shape_are_refused(source: WeightSource) -> None:
    with pytest.raises(InvalidRequest, match=r"tensor w: BF16 \[3\] needs uint8 \[6\], got uint8 \[5\]"):
        source.publish(0, {"w": HostTensor("BF16", (3,), np.zeros(5, np.uint8))})


def test_the_memory_is_reused(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(3)
    addresses = []
    for number, tensors in enumerate(versions):
        source.publish(number, tensors, run=RUN)
        pull(mirror, source, number, tensors)
        held = [store.weight_set() for store in (source, mirror)]
        addresses.append([each.data.ctypes.data for weight_set in held for each in weight_set.tensors.values()])  # type: ignore[union-attr]
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_stream_in_progress_sends_its_version_while_newer_ones_are_published(source: WeightSource) -> None:
    versions = history(5)
    source.publish(0, versions[0], run=RUN)
    streams = {0: source.stream(WeightsRequest(RUN, 0))}
    begun: dict[int, list[Message]] = {0: [next(streams[0])]}
    for number in range(1, 5):
        source.publish(number, versions[number], run=RUN)
        # Everything of the version before: it starts with the newest bytes and takes the difference back.
        streams[number] = source.stream(WeightsRequest(RUN, number - 1))
        begun[number] = [next(streams[number])]
    for number, stream in streams.items():
        wanted = max(0, number - 1)

        class Recorded:
            address = "actor at local"

            def get_weights(
                self, request: WeightsRequest, timeout: float, number: int = number, stream: Any = stream
            ) -> Any:
                yield from begun[number]
                yield from stream

        mirror = WeightMirror(num_threads=1)
        mirror.pull([Recorded()], RUN, wanted, digest(versions[wanted]), timeout=5)
        assert_equal(mirror.weight_set(), versions[wanted])
        mirror.close()
    assert all(buffer.readers == 0 for buffer in source._buffers)


def test_pulls_during_publications_get_the_version_that_they_asked_for() -> None:
    versions = history(12)
    source = WeightSource(capacity=12, num_threads=2)
    source.publish(0, versions[0], run=RUN)
    failures: list[str] = []

    def follow(seed: int) -> None:
        random = np.random.default_rng(seed)
        mirror = WeightMirror(num_threads=1)
        for _ in range(12):
            wanted = int(random.choice(source.versions))
            if random.random() < 0.3:
                mirror.reset()
            pull(mirror, source, wanted, versions[wanted])
            assert_equal(mirror.weight_set(), versions[wanted])
        mirror.close()

    with ThreadPoolExecutor(4) as executor:
        pulls = [executor.submit(follow, seed) for seed in range(4)]
        for number in range(1, 12):
            source.publish(number, versions[number], run=RUN)
        for each in pulls:
            each.result()
    assert failures == []
    source.close()


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(["F32", "BF16", "F16"]), min_size=4, max_size=4),
    fraction=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_any_shapes_and_bits_arrive(shapes: list[list[int]], dtypes: list[Any], fraction: float, seed: int) -> None:
    before = {f"t{index}": tensor(tuple(shape), seed + index, dtypes[index]) for index, shape in enumerate(shapes)}
    after = changed(before, seed, fraction)
    source, mirror = WeightSource(num_threads=1), WeightMirror(num_threads=1)
    for number, tensors in enumerate((before, after)):
        source.publish(number, tensors, run=RUN)
        pull(mirror, source, number, tensors)
        assert_equal(mirror.weight_set(), tensors)
    source.close()
    mirror.close()


# Faults of a stream.


def published(source: WeightSource) -> tuple[Tensors, Tensors]:
    """Publish versions 0 and 1, whose difference has several messages' worth of chunks."""
    before, after = weights(), changed(weights(), 1, 0.3)
    source.publish(0, before, run=RUN)
    source.publish(1, after, run=RUN)
    return before, after


def one_by_one(stream: Iterator[Message]) -> Iterator[Message]:
    """Send every chunk in a separate message."""
    for message in stream:
        if isinstance(message, Manifest):
            yield message
        else:
            yield from ((chunk,) for chunk in message)


def test_a_stream_killed_at_any_chunk_leaves_a_usable_mirror(source: WeightSource) -> None:
    before, after = published(source)
    for held in (None, before):
        count = 0
        while True:
            mirror = WeightMirror(num_threads=1)
            if held is not None:
                pull(mirror, source, 0, held)
            cut = cut_after(count, GONE)
            peer = LocalPeer(source, fault=lambda stream, cut=cut: cut(one_by_one(stream)))
            complete = len(
                list(one_by_one(source.stream(WeightsRequest(RUN, 1, b"", 0 if held else None, digest(before)))))
            )
            if count >= complete:
                break
            with pytest.raises(ServiceUnavailable):
                pull(mirror, peer, 1, after)
            if held is None:
                assert mirror.weight_set() is None
            else:
                assert_equal(mirror.weight_set(), before)
            result = pull(mirror, source, 1, after)
            assert result.kind == ("delta" if held else "full")
            assert_equal(mirror.weight_set(), after)
            mirror.close()
            count += 1
        assert count > 5


def test_a_lost_source_is_replaced_by_the_next(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)
    peers = [LocalPeer(source, "generator at one", cut_after(1, GONE)), LocalPeer(source, "actor at two")]
    result = mirror.pull(peers, RUN, 1, digest(after), timeout=5)
    assert (result.source, result.kind) == ("actor at two", "delta")
    assert_equal(result.weight_set, after)


def altered(stream: Iterator[Message], change: Callable[[Chunk], Chunk]) -> Iterator[Message]:
    """Yield the chunks of a stream, with the first one changed."""
    first, *rest = next(stream)  # type: ignore[misc]
    yield (change(first), *rest)
    yield from stream


def flipped(chunk: Chunk) -> Chunk:
    data = bytearray(bytes(chunk.data))
    data[len(data) // 2] ^= 1
    return replace(chunk, data=bytes(data))


def test_damaged_weights_are_refused_by_name_and_everything_is_taken_from_the_next_source(
    source: WeightSource, mirror: WeightMirror
) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)

    def damaged(stream: Iterator[Message]) -> Iterator[Message]:
        yield next(stream)
        yield from altered(stream, flipped)

    bad, good = LocalPeer(source, "generator at bad", damaged), LocalPeer(source, "actor at good")
    with pytest.raises(ServiceFailed, match=r"generator at bad: GetWeights: .*(digest|zstd)"):
        mirror.pull([bad], RUN, 1, digest(after), timeout=5)
    # A delta, then once everything.
    assert [request.have_version for request in bad.requests] == [0, None]
    assert mirror.weight_set() is None
    result = mirror.pull([bad, good], RUN, 1, digest(after), timeout=5)
    assert (result.source, result.kind) == ("actor at good", "full")
    assert_equal(result.weight_set, after)


def test_a_wrong_delta_is_undone(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)

    def drop_one(stream: Iterator[Message]) -> Iterator[Message]:
        manifest = next(stream)
        assert isinstance(manifest, Manifest)
        chunks = [chunk for message in stream for chunk in message]  # type: ignore[union-attr]
        if manifest.base_version is None:
            raise GONE
        yield replace(manifest, data_bytes=manifest.data_bytes - len(chunks[0].data))
        yield from grouped(chunks[1:])

    with pytest.raises(
        ServiceUnavailable, match=r"tensors have another digest than in the manifest, the first is model"
    ):
        pull(mirror, LocalPeer(source, fault=drop_one), 1, after)
    assert_equal(mirror.weight_set(), before)
    assert mirror.versions == (0,)


def test_a_mirror_with_a_damaged_copy_takes_everything(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    held = pull(mirror, source, 0, before)
    held.weight_set.tensors["model.proj.weight"].data[5] ^= 1
    result = pull(mirror, source, 1, after)
    assert result.kind == "full"
    assert_equal(mirror.weight_set(), after)


HOSTILE: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "another version": (lambda m: replace(m, version=9), "expected version 1"),
    "another run": (lambda m: replace(m, run="other"), "of run 'other'"),
    "another digest": (lambda m: replace(m, digest=bytes(16)), "expected version 1"),
    "other digests of tensors": (
        lambda m: replace(m, digests=(bytes(16), *m.digests[1:])),
        "the digests of the tensors do not give",
    ),
    "unsorted names": (lambda m: replace(m, layouts=m.layouts[::-1], digests=m.digests[::-1]), "sorted and distinct"),
    "a name twice": (
        lambda m: replace(m, layouts=(m.layouts[0], *m.layouts), digests=(m.digests[0], *m.digests)),
        "sorted and distinct",
    ),
    "more than memory": (
        lambda m: replace(m, layouts=(replace(m.layouts[0], shape=(2**40,)), *m.layouts[1:]), base_version=None),
        "expected weights of at most",
    ),
    "another base": (lambda m: replace(m, base_version=7), "against version 7"),
    "other shapes": (
        lambda m: replace(m, layouts=(replace(m.layouts[0], shape=(7,)), *m.layouts[1:])),
        "expected a delta against version 0 with its tensors",
    ),
    "more bytes than everything": (lambda m: replace(m, data_bytes=2**50), "expected a delta of at most"),
    "too many links": (lambda m: replace(m, num_links=2**31), "64 links"),
    "too few bytes": (lambda m: replace(m, data_bytes=m.data_bytes - 1), "bytes, got more"),
    "too many bytes": (lambda m: replace(m, data_bytes=m.data_bytes + 1), "the stream ended after"),
    "everything in a delta": (lambda m: replace(m, base_version=None), "expected raw chunk 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(case: str, source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)
    change, expected = HOSTILE[case]

    def fault(stream: Iterator[Message]) -> Iterator[Message]:
        manifest = next(stream)
        assert isinstance(manifest, Manifest)
        if manifest.base_version is None:
            raise GONE
        yield change(manifest)
        yield from stream

    with pytest.raises(ServiceUnavailable, match=expected):
        pull(mirror, LocalPeer(source, fault=fault), 1, after)
    if case != "everything in a delta":
        assert_equal(mirror.weight_set(), before)
    pull(mirror, source, 1, after)
    assert_equal(mirror.weight_set(), after)


BAD_CHUNKS: dict[str, tuple[Callable[[Chunk], Chunk], str]] = {
    "a tensor that does not exist": (lambda c: replace(c, tensor=99), "unexpected chunk 0 of tensor 99"),
    "a tensor that has not changed": (lambda c: replace(c, tensor=1), "unexpected chunk 0 of tensor 1"),
    "a range beyond the end": (lambda c: replace(c, index=3), "unexpected chunk 3 of tensor 0"),
    "a range twice": (lambda c: replace(c, index=1), "at most 1 chunks per range"),
    "raw bytes in a delta": (lambda c: replace(c, encoding=Encoding.RAW), "not the encoding of a difference"),
    "damaged bytes": (lambda c: replace(c, data=bytes(len(c.data))), "not a zstd frame"),
}


@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_a_bad_chunk_of_a_delta_is_refused_and_the_mirror_keeps_its_version(
    case: str, source: WeightSource, mirror: WeightMirror
) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)
    change, expected = BAD_CHUNKS[case]

    def fault(stream: Iterator[Message]) -> Iterator[Message]:
        manifest = next(stream)
        assert isinstance(manifest, Manifest)
        if manifest.base_version is None:
            raise GONE
        yield manifest
        yield from altered(stream, change)

    with pytest.raises(ServiceUnavailable, match=expected):
        pull(mirror, LocalPeer(source, fault=fault), 1, after)
    assert_equal(mirror.weight_set(), before)


FULL_FAULTS: dict[str, tuple[Callable[[list[Chunk]], list[Chunk]], str]] = {
    "a chunk is missing": (lambda chunks: chunks[1:], "expected raw chunk 0 of tensor 0"),
    "the last chunk is missing": (lambda chunks: chunks[:-1], "the stream ended before chunk 0 of tensor 4"),
    "chunks are swapped": (lambda chunks: [chunks[1], chunks[0], *chunks[2:]], "expected raw chunk 0 of tensor 0"),
    "a chunk too many": (lambda chunks: [*chunks, chunks[-1]], "expected raw chunk -1 of tensor -1"),
    "a short chunk": (lambda chunks: [replace(chunks[0], data=b"x"), *chunks[1:]], "expected 524288 bytes in chunk 0"),
    "other bytes": (lambda chunks: [flipped(chunks[0]), *chunks[1:]], "1 tensors have another digest"),
}


@pytest.mark.parametrize("case", FULL_FAULTS)
def test_a_wrong_full_set_is_refused_and_the_mirror_is_empty(
    case: str, source: WeightSource, mirror: WeightMirror
) -> None:
    before, _ = published(source)
    change, expected = FULL_FAULTS[case]

    def fault(stream: Iterator[Message]) -> Iterator[Message]:
        yield next(stream)
        chunks = [chunk for message in stream for chunk in message]  # type: ignore[union-attr]
        yield from grouped(change(chunks))

    with pytest.raises(ServiceFailed, match=expected):
        pull(mirror, LocalPeer(source, fault=fault), 0, before)
    assert mirror.weight_set() is None
    assert mirror.versions == ()
    pull(mirror, source, 0, before)
    assert_equal(mirror.weight_set(), before)


def test_a_stream_without_a_manifest_or_with_two_is_refused(source: WeightSource, mirror: WeightMirror) -> None:
    before, _ = published(source)

    def twice(stream: Iterator[Message]) -> Iterator[Message]:
        manifest = next(stream)
        yield manifest
        yield manifest

    def without(stream: Iterator[Message]) -> Iterator[Message]:
        next(stream)
        yield from stream

    for fault, expected in ((twice, "only one manifest"), (without, "a manifest first"), (lambda _: iter(()), "first")):
        with pytest.raises(ServiceFailed, match=expected):
            pull(mirror, LocalPeer(source, fault=fault), 0, before)


def test_busy_sources_are_asked_again_until_the_timeout(source: WeightSource, mirror: WeightMirror) -> None:
    before, _ = published(source)
    attempts = []

    def busy(stream: Iterator[Message]) -> Iterator[Message]:
        attempts.append(1)
        if len(attempts) < 3:
            raise ServiceBusy("actor at local: busy")
        yield from stream

    pull(mirror, LocalPeer(source, fault=busy), 0, before)
    assert len(attempts) == 3
    mirror.reset()
    always = LocalPeer(source, fault=cut_after(0, ServiceBusy("actor at local: busy")))
    with pytest.raises(ServiceBusy, match="actor at local: busy"):
        mirror.pull([always], RUN, 0, digest(before), timeout=0.1)
    with pytest.raises(NoResponse, match="no time left"):
        mirror.pull([LocalPeer(source)], RUN, 0, digest(before), timeout=0)


# A mirror as a source.


def test_a_mirror_serves_its_version_and_the_delta_to_it(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(3)
    children = [WeightMirror(num_threads=1), WeightMirror(num_threads=1)]
    for number, tensors in enumerate(versions):
        source.publish(number, tensors, run=RUN)
        pull(mirror, source, number, tensors)
        results = [pull(child, mirror, number, tensors) for child in children[: 2 if number == 2 else 1]]
        assert [result.kind for result in results] == ([["full"], ["delta"], ["delta", "full"]][number])
        assert_equal(results[-1].weight_set, tensors)
    with pytest.raises(FailedPrecondition, match="this generator has no version 0"):
        pull(WeightMirror(num_threads=1), mirror, 0, versions[0])
    assert_equal(pull(WeightMirror(num_threads=1), mirror, 1, versions[1]).weight_set, versions[1])


def test_a_source_may_wait_for_a_version(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    child = WeightMirror(num_threads=1)
    results: list[PulledWeights] = []
    waiting = threading.Thread(
        target=lambda: results.append(
            child.pull([LocalPeer(mirror)], RUN, 1, digest(after), timeout=20, wait_seconds=20)
        )
    )
    waiting.start()
    pull(mirror, source, 0, before)
    pull(mirror, source, 1, after)
    waiting.join(20)
    assert_equal(results[0].weight_set, after)


def test_a_wait_ends_when_the_pull_of_the_source_fails(source: WeightSource, mirror: WeightMirror) -> None:
    _, after = published(source)
    stream = mirror.stream(WeightsRequest(RUN, 1, digest(after), wait_seconds=60))
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(next, stream)
        failing = LocalPeer(source, fault=cut_after(1, GONE))
        while not waiting.done():
            with pytest.raises(ServiceUnavailable):
                pull(mirror, failing, 1, after)
        with pytest.raises(ServiceUnavailable, match="version 1 did not arrive"):
            waiting.result()


def test_a_wait_ends_with_the_caller_and_with_the_store(source: WeightSource) -> None:
    gone = threading.Event()
    with ThreadPoolExecutor(2) as executor:
        request = WeightsRequest(RUN, 1, wait_seconds=60)
        first = executor.submit(next, source.stream(request, gone.is_set))
        second = executor.submit(next, source.stream(request))
        gone.set()
        source.wake()
        with pytest.raises(Cancelled):
            first.result(20)
        source.close()
        with pytest.raises(ServiceUnavailable):
            second.result(20)


def test_messages_are_small_and_share_small_tensors(source: WeightSource) -> None:
    tensors = {f"t{index:03}": tensor((1000,), index) for index in range(300)} | {"z": tensor((5 * CHUNK_BYTES,))}
    source.publish(0, tensors)
    manifest, *messages = source.stream(WeightsRequest(RUN, 0))
    assert isinstance(manifest, Manifest)
    sizes = [sum(len(chunk.data) for chunk in message) for message in messages]  # type: ignore[union-attr]
    assert max(sizes) <= MESSAGE_DATA
    assert sum(sizes) == manifest.data_bytes == manifest.num_bytes
    assert len(messages) <= manifest.num_bytes / MESSAGE_DATA * 1.5 + 1
    names = [layout.name for layout in manifest.layouts]
    assert combined_digest(dict(zip(names, manifest.digests, strict=True))) == manifest.digest
