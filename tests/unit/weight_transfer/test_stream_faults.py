"""Streams that end early, or send wrong weights, manifests or chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from quartet.errors import (
    NoResponse,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.weight_transfer.messages import (
    Chunk,
    Encoding,
    Manifest,
    Message,
    WeightsRequest,
    grouped,
)
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from tests.unit.weight_transfer.samples import (
    GONE,
    RUN,
    LocalPeer,
    assert_equal,
    cut_after,
    digest,
    published,
    pull,
)


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
            mirror = WeightMirror(num_threads=1, shares=False)
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
            assert result.way == ("delta" if held else "full")
            assert_equal(mirror.weight_set(), after)
            mirror.close()
            count += 1
        assert count > 5


def test_a_lost_source_is_replaced_by_the_next(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    pull(mirror, source, 0, before)
    peers = [LocalPeer(source, "generator at one", cut_after(1, GONE)), LocalPeer(source, "actor at two")]
    result = mirror.pull(peers, RUN, 1, digest(after), timeout=5)
    assert (result.source, result.way) == ("actor at two", "delta")
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
    assert (result.source, result.way) == ("actor at good", "full")
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
    assert result.way == "full"
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
