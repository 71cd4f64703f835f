"""Weights that a process maps instead of receiving them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from quartet.errors import OutOfMemory, ServiceFailed, ServiceUnavailable
from quartet.weight_transfer import mapped_regions, receiver, shared_memory
from quartet.weight_transfer import source as source_module
from quartet.weight_transfer.delta import encode
from quartet.weight_transfer.messages import Manifest
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.shared_memory import Allocator, machine
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import AdapterSettings
from tests.unit.weight_transfer.samples import (
    RUN,
    LocalPeer,
    assert_equal,
    changed,
    digest,
    history,
    mapped,
    opened,
    pull,
    weights,
)


@pytest.fixture
def source() -> Iterator[WeightSource]:
    source = WeightSource(num_threads=2)
    yield source
    source.close()


def test_versions_arrive_without_bytes_and_cannot_be_written(
    source: WeightSource, mapping_mirror: WeightMirror
) -> None:
    for number, tensors in enumerate(history(4)):
        source.publish(number, tensors.items(), run=RUN)
        result = pull(mapping_mirror, source, number, tensors)
        assert (result.way, result.bytes_received, result.source) == ("shared memory", 0, "actor at local")
        assert_equal(result.weight_set, tensors)
        with pytest.raises(ValueError, match="read-only"):
            result.weight_set.tensors["model.norm.weight"].data[0] = 1
        mapping_mirror.release()


def test_the_changed_tensors_are_named_against_the_version_before(
    source: WeightSource, mapping_mirror: WeightMirror
) -> None:
    first = weights()
    second = changed(first, 1, 0.5, "model.norm.weight")
    third = changed(second, 2, 0.5, "model.proj.weight")
    results = []
    for number, tensors in enumerate((first, second, third)):
        source.publish(number, tensors.items(), AdapterSettings(4, 8.0, ("proj",)), RUN)
        results.append(pull(mapping_mirror, source, number, tensors))
        assert results[-1].weight_set.adapter == AdapterSettings(4, 8.0, ("proj",))
    assert [result.changed for result in results] == [set(first), {"model.norm.weight"}, {"model.proj.weight"}]
    assert [result.base_digest for result in results] == [b"", *(result.weight_set.digest for result in results[:2])]


def test_a_version_stays_as_it_is_until_it_is_released(source: WeightSource, mapping_mirror: WeightMirror) -> None:
    versions = history(6)
    source.publish(0, versions[0].items(), run=RUN)
    result = pull(mapping_mirror, source, 0, versions[0])
    for number in range(1, 6):
        source.publish(number, versions[number].items(), run=RUN)
        assert_equal(result.weight_set, versions[0])
    # The places of version 0, which are read, and two more.
    assert len(source._allocator.regions) == 1
    assert source._allocator.regions[0].used < 3.1 * sum(each.data.nbytes for each in versions[0].values())
    mapping_mirror.release()
    assert_equal(pull(mapping_mirror, source, 5, versions[5]).weight_set, versions[5])


def test_what_never_changes_has_one_place(source: WeightSource) -> None:
    first = weights()
    source.publish(0, first.items(), run=RUN)
    (region,) = source._allocator.regions
    used = region.used
    for number in range(1, 4):
        source.publish(number, changed(first, number, 0.5, "model.norm.weight").items(), run=RUN)
    assert region.used - used == first["model.norm.weight"].data.nbytes


def test_a_mirror_of_another_machine_gets_chunks(source: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    mirror = WeightMirror(num_threads=1)
    mirror._machine = machine() + "x"
    result = pull(mirror, source, 0, tensors)
    assert (result.way, result.bytes_received > 0) == ("full", True)
    assert_equal(result.weight_set, tensors)
    mirror.close()


def test_memory_that_cannot_be_opened_is_sent_instead(
    source: WeightSource, mapping_mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def refuse(*_: Any) -> Any:
        attempts.append(1)
        raise ServiceUnavailable("cannot open the shared memory")

    monkeypatch.setattr(mapping_mirror._mapped, "map", refuse)
    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    peer = LocalPeer(source)
    result = mapping_mirror.pull([peer], RUN, 0, digest(tensors), timeout=5)
    assert (result.way, [bool(request.machine) for request in peer.requests]) == ("full", [True, False])
    assert_equal(result.weight_set, tensors)
    after = changed(tensors, 1)
    source.publish(1, after.items(), run=RUN)
    assert mapping_mirror.pull([peer], RUN, 1, digest(after), timeout=5).way == "delta"
    assert len(attempts) == 1
    # A later process may be another one, whose memory can be opened.
    monkeypatch.setattr(os, "getpid", lambda: 2**20)
    mapping_mirror.pull([peer], RUN, 0, digest(tensors), timeout=5)
    assert len(attempts) == 2


def test_memory_that_could_once_not_be_opened_is_tried_again_later(
    source: WeightSource, mapping_mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REMAP_PULLS", 3)

    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    ways = []
    with structlog.testing.capture_logs() as logs:
        for number, tensors in enumerate(history(9)):
            source.publish(number, tensors.items(), run=RUN)
            with monkeypatch.context() as patch:
                if number in (0, 3):
                    patch.setattr(mapped_regions, "_open", refuse)
                result = pull(mapping_mirror, source, number, tensors)
            ways.append(result.way)
            assert_equal(result.weight_set, tensors)
    assert [way == "shared memory" for way in ways] == 6 * [False] + 3 * [True]
    assert len([each for each in logs if each["event"] == "weights are sent, not shared"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: {"places": tuple((region, 2**60) for region, _ in manifest.places)},
        lambda manifest: {"regions": tuple(replace(each, num_bytes=2**62) for each in manifest.regions)},
        lambda manifest: {"regions": tuple(replace(each, num_bytes=0) for each in manifest.regions)},
        lambda manifest: {"regions": tuple(replace(each, fd=2**20) for each in manifest.regions)},
    ],
)
def test_of_a_manifest_with_wrong_places_the_bytes_are_sent(
    change: Callable[[Manifest], dict[str, Any]], source: WeightSource, mapping_mirror: WeightMirror
) -> None:
    def beyond(stream: Iterator[Any]) -> Iterator[Any]:
        for message in stream:
            if isinstance(message, Manifest) and message.regions:
                yield replace(message, **change(message))
            else:
                yield message

    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    result = pull(mapping_mirror, LocalPeer(source, fault=beyond), 0, tensors)  # type: ignore[arg-type]
    assert result.way == "full"
    assert_equal(result.weight_set, tensors)


def test_damaged_memory_is_named(source: WeightSource, mapping_mirror: WeightMirror) -> None:
    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    result = pull(mapping_mirror, source, 0, tensors)
    result.verify()
    index = [layout.name for layout in source._layouts].index("model.proj.weight")
    source._memories[index].data[7] ^= 1
    with pytest.raises(
        ServiceFailed, match=r"actor at local: shared memory: version 0: model\.proj\.weight has another digest"
    ):
        result.verify()


def test_a_delta_is_encoded_when_the_first_receiver_asks_for_it(
    source: WeightSource, mapping_mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def counted(*arguments: Any) -> Any:
        encoded.append(1)
        return encode(*arguments)

    monkeypatch.setattr(source_module, "encode", counted)
    remote = [WeightMirror(num_threads=1, shares=False) for _ in range(2)]
    counts, ways = [], []
    for number, tensors in enumerate(history(3)):
        source.publish(number, tensors.items(), run=RUN)
        pull(mapping_mirror, source, number, tensors)
        mapping_mirror.release()
        counts.append(len(encoded))
        results = [pull(each, source, number, tensors) for each in remote]
        counts.append(len(encoded))
        ways.append([result.way for result in results])
    assert ways == [["full", "full"], ["delta", "delta"], ["delta", "delta"]]
    chunks = counts[3]
    assert chunks > 0
    assert counts == [0, 0, 0, chunks, chunks, 2 * chunks]
    for each in remote:
        each.close()


def test_a_version_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 10**9)
    allocator = Allocator()
    with pytest.raises(
        OutOfMemory, match=r"1\.50 GB of memory are missing for a version, 1\.00 GB are free; give this machine"
    ):
        allocator.allocate([10**9, 5 * 10**8])
    (first,) = allocator.allocate([10**6])
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 0)
    # The region has room, but nobody has written to it yet.
    with pytest.raises(OutOfMemory):
        allocator.allocate([10**6])
    place = first.offset
    del first
    assert allocator.allocate([10**6])[0].offset == place


def test_a_generator_that_maps_gives_its_copy_back(source: WeightSource, mapping_mirror: WeightMirror) -> None:
    tensors, before = weights(), mapped()
    source.publish(0, tensors.items(), run=RUN)
    here, mapping_mirror._machine = mapping_mirror._machine, machine() + "x"
    assert pull(mapping_mirror, source, 0, tensors).way == "full"
    assert mapped() == before + 2
    after = changed(tensors, 1)
    source.publish(1, after.items(), run=RUN)
    mapping_mirror._machine = here
    result = pull(mapping_mirror, source, 1, after)
    assert result.way == "shared memory"
    assert_equal(result.weight_set, after)
    # The region of the source, here and there.
    assert (mapping_mirror._allocator.regions, mapped()) == ([], before + 2)
    mapping_mirror._machine = machine() + "x"
    assert_equal(pull(mapping_mirror, source, 1, after).weight_set, after)


def test_nothing_is_left() -> None:
    gc.collect()  # What earlier tests have left in cycles.
    before = opened(), mapped()
    source, mirror = WeightSource(num_threads=1), WeightMirror(num_threads=1)
    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    result = pull(mirror, source, 0, tensors)
    # A mapping has a descriptor, too, and keeps that of the memory.
    assert (opened(), mapped()) == (before[0] + 4, before[1] + 2)
    del result
    mirror.release()
    assert mapped() == before[1] + 2, "the next version needs the mapping again"
    mirror.close()
    assert mapped() == before[1] + 1
    source.close()
    assert (opened(), mapped()) == before


@pytest.mark.parametrize("refused", ["memfd_create", "seal"])
def test_without_sealed_memory_weights_are_sent(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse) if refused == "memfd_create" else monkeypatch.setattr(
        shared_memory.fcntl, "fcntl", refuse
    )
    shared_memory._boot.cache_clear()
    try:
        source, mirror = WeightSource(num_threads=1), WeightMirror(num_threads=1)
        tensors = weights()
        source.publish(0, tensors.items(), run=RUN)
        result = pull(mirror, source, 0, tensors)
        assert (result.way, source.machine) == ("full", "")
        assert_equal(result.weight_set, tensors)
    finally:
        shared_memory._boot.cache_clear()
    mirror.close()
    source.close()


def test_memory_that_cannot_grow_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(27, "File too large")

    machine()
    monkeypatch.setattr(os, "ftruncate", refuse)
    source, mirror = WeightSource(num_threads=1), WeightMirror(num_threads=1)
    for number, tensors in enumerate(history(3)):
        source.publish(number, tensors.items(), run=RUN)
        result = pull(mirror, source, number, tensors)
        assert result.way == ("delta" if number else "full")
        assert_equal(result.weight_set, tensors)
    mirror.close()
    source.close()
