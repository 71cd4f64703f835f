"""Sources, mirrors and the streams between them: windows, deltas and concurrent publication."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import (
    FailedPrecondition,
    InvalidRequest,
)
from quartet.weight_transfer.messages import (
    CHUNK_BYTES,
    MESSAGE_DATA,
    Manifest,
    Message,
    WeightsRequest,
)
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.store import WeightStore
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor, combined_digest
from tests.unit.weight_transfer.samples import (
    RUN,
    LocalPeer,
    assert_equal,
    changed,
    digest,
    history,
    pull,
    tensor,
    weights,
)
from tests.waiting import LIMIT


def test_a_mirror_takes_everything_then_deltas(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(4)
    results = []
    for number, tensors in enumerate(versions):
        assert source.publish(number, tensors.items(), run=RUN) == digest(tensors)
        results.append(pull(mirror, source, number, tensors))
        assert_equal(results[-1].weight_set, tensors)
        assert results[-1].weight_set.version == number
        assert combined_digest(mirror.tensor_digests()) == digest(tensors)
    assert [result.way for result in results] == ["full", "delta", "delta", "delta"]
    total = sum(each.data.nbytes for each in versions[0].values())
    assert results[0].bytes_received == total
    assert results[1].bytes_received < total / 8
    assert results[0].changed == frozenset(versions[0])
    assert results[1].changed >= {"model.embed.weight", "model.proj.weight"}
    assert "model.empty" not in results[1].changed
    assert source.last is not None


def test_only_changed_tensors_are_sent(source: WeightSource, mirror: WeightMirror) -> None:
    before = weights()
    after = changed(before, 1, 0.5, "model.proj.weight")
    source.publish(0, before.items(), run=RUN)
    assert pull(mirror, source, 0, before).base_digest == b""
    source.publish(1, after.items(), run=RUN)
    result = pull(mirror, source, 1, after)
    assert (result.base_digest, result.changed) == (digest(before), {"model.proj.weight"})
    assert_equal(mirror.weight_set(), after)


def test_the_held_version_is_not_sent_again(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    source.publish(0, tensors.items(), run=RUN)
    peer = LocalPeer(source)
    pull(mirror, peer, 0, tensors)
    again = pull(mirror, peer, 0, tensors)
    assert (again.way, again.changed, again.bytes_received, len(peer.requests)) == ("held", frozenset(), 0, 1)
    assert again.base_digest == digest(tensors)


def test_every_version_in_the_window_is_sent_as_everything_and_against_any_other(source: WeightSource) -> None:
    versions = history(5)
    for number, tensors in enumerate(versions):
        source.publish(number, tensors.items(), run=RUN)
    assert source.versions == (2, 3, 4)
    for held in source.versions:
        for wanted in source.versions:
            mirror = WeightMirror(num_threads=1, shares=False)
            assert pull(mirror, source, held, versions[held]).way == "full"
            assert_equal(mirror.weight_set(), versions[held])
            result = pull(mirror, source, wanted, versions[wanted])
            assert result.way == ("held" if held == wanted else "delta")
            assert_equal(mirror.weight_set(), versions[wanted])
            mirror.close()


def test_a_version_outside_the_window_is_refused_with_the_versions_in_it(
    source: WeightSource, mirror: WeightMirror
) -> None:
    versions = history(4)
    for number, tensors in enumerate(versions):
        source.publish(number, tensors.items(), run=RUN)
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
    source.publish(0, versions[0].items(), run=RUN)
    pull(mirror, source, 0, versions[0])
    for number in range(1, 5):
        source.publish(number, versions[number].items(), run=RUN)
    assert pull(mirror, source, 4, versions[4]).way == "full"
    assert_equal(mirror.weight_set(), versions[4])


def test_everything_is_sent_if_the_delta_is_not_smaller(source: WeightSource, mirror: WeightMirror) -> None:
    versions = [weights(seed) for seed in (0, 10, 20)]
    for number, tensors in enumerate(versions):
        source.publish(number, tensors.items(), run=RUN)
    pull(mirror, source, 0, versions[0])
    assert pull(mirror, source, 2, versions[2]).way == "full"
    assert_equal(mirror.weight_set(), versions[2])


def test_publishing_the_same_weights_again_changes_nothing(source: WeightSource) -> None:
    tensors = weights()
    first = source.publish(0, tensors.items(), run=RUN)
    assert source.publish(0, tensors.items(), run=RUN) == first
    assert source.versions == (0,)
    # The same weights under another number: an update with no effect.
    source.publish(1, tensors.items(), run=RUN)
    assert source.versions == (0, 1)
    assert source.last is not None
    assert source.last.changed_tensors == 0


def test_a_full_window_is_kept_if_its_newest_version_is_published_again(
    source: WeightSource, mirror: WeightMirror
) -> None:
    versions = history(5)
    for number, tensors in enumerate(versions[:4]):
        source.publish(number, tensors.items(), run=RUN)
    assert source.versions == (1, 2, 3)
    used = sum(region.used for region in source._allocator.regions)
    source.publish(3, versions[3].items(), run=RUN)
    assert source.versions == (1, 2, 3)
    for number in (1, 2, 3):
        assert_equal(pull(mirror, source, number, versions[number]).weight_set, versions[number])
    # Other weights under its number take the place of the oldest version.
    source.publish(3, versions[4].items(), run=RUN)
    assert source.versions == (2, 3, 3)
    assert sum(region.used for region in source._allocator.regions) == used
    for number, tensors in ((2, versions[2]), (3, versions[4]), (3, versions[3])):
        assert_equal(pull(mirror, source, number, tensors).weight_set, tensors)


def test_a_tensor_that_changed_and_changed_back_is_not_sent(source: WeightSource, mirror: WeightMirror) -> None:
    before = weights()
    between = changed(before, 1, 0.1, "model.proj.weight")
    after = changed(before, 2, 0.1, "model.norm.weight")
    for number, tensors in enumerate((before, between, after)):
        source.publish(number, tensors.items(), run=RUN)
    pull(mirror, source, 0, before)
    result = pull(mirror, source, 2, after)
    assert (result.way, result.changed) == ("delta", {"model.norm.weight"})
    assert_equal(result.weight_set, after)


def test_the_run_may_become_known_after_the_first_version(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(2)
    source.publish(0, versions[0].items())
    assert pull(mirror, source, 0, versions[0]).way == "full"
    source.publish(1, versions[1].items(), run=RUN)
    assert pull(mirror, source, 1, versions[1]).way == "delta"


def test_another_run_or_other_shapes_forget_earlier_versions(source: WeightSource) -> None:
    source.publish(0, weights().items(), run=RUN)
    source.publish(1, {"only": tensor((3, 5))}.items(), run=RUN)
    assert source.versions == (1,)
    source.publish(1, {"only": tensor((3, 5))}.items(), run="other")
    assert source.versions == (1,)
    assert source.digest_of(1) == digest({"only": tensor((3, 5))})


def test_a_repeated_version_number_after_a_rollback_has_its_new_weights(
    source: WeightSource, mirror: WeightMirror
) -> None:
    before, abandoned, after = weights(), changed(weights(), 1), changed(weights(), 2)
    source.publish(1, before.items(), run=RUN)
    source.publish(2, abandoned.items(), run=RUN)
    pull(mirror, source, 2, abandoned)
    source.publish(2, after.items(), run=RUN)
    assert pull(mirror, source, 2, after).way == "delta"
    assert_equal(mirror.weight_set(), after)
    source.reset()
    assert source.versions == ()
    source.publish(1, before.items(), run=RUN)
    assert pull(mirror, source, 1, before).way == "full"
    assert_equal(mirror.weight_set(), before)


def test_the_adapter_settings_arrive(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    source.publish(0, tensors.items(), AdapterSettings(8, 16.0, ("q_proj", "v_proj")), RUN)
    assert pull(mirror, source, 0, tensors).weight_set.adapter == AdapterSettings(8, 16.0, ("q_proj", "v_proj"))
    after = changed(tensors, 1)
    source.publish(1, after.items(), AdapterSettings(8, 32.0, ("q_proj",)), RUN)
    assert pull(mirror, source, 1, after).weight_set.adapter == AdapterSettings(8, 32.0, ("q_proj",))


def test_published_weights_are_copied(source: WeightSource, mirror: WeightMirror) -> None:
    tensors = weights()
    expected = digest(tensors)
    source.publish(0, tensors.items(), run=RUN)
    for each in tensors.values():
        each.data[:] = 0
    assert mirror.pull([LocalPeer(source)], RUN, 0, expected, timeout=5).weight_set.digest == expected


def test_bytes_that_do_not_fit_the_shape_are_refused(source: WeightSource) -> None:
    with pytest.raises(InvalidRequest, match=r"tensor w: BF16 \[3\] needs uint8 \[6\], got uint8 \[5\]"):
        source.publish(0, {"w": HostTensor("BF16", (3,), np.zeros(5, np.uint8))}.items())


def test_a_source_of_two_versions_has_two_places_and_a_mirror_one(mirror: WeightMirror) -> None:
    source = WeightSource(capacity=2, num_threads=1)
    addresses: dict[WeightStore, list[list[int]]] = {source: [], mirror: []}
    for number, tensors in enumerate(history(6)):
        source.publish(number, tensors.items(), run=RUN)
        pull(mirror, source, number, tensors)
        for store, found in addresses.items():
            held = store.weight_set()
            assert held is not None
            found.append([each.data.ctypes.data for each in held.tensors.values()])
    first, second = addresses[source][:2]
    assert first != second
    assert addresses[source] == [first, second] * 3
    assert addresses[mirror] == [addresses[mirror][0]] * 6
    source.close()


def test_a_stream_in_progress_sends_its_version_while_newer_ones_are_published(source: WeightSource) -> None:
    versions = history(5)
    source.publish(0, versions[0].items(), run=RUN)
    streams = {0: source.stream(WeightsRequest(RUN, 0))}
    begun: dict[int, list[Message]] = {0: [next(streams[0])]}
    for number in range(1, 5):
        source.publish(number, versions[number].items(), run=RUN)
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

        mirror = WeightMirror(num_threads=1, shares=False)
        mirror.pull([Recorded()], RUN, wanted, digest(versions[wanted]), timeout=5)
        assert_equal(mirror.weight_set(), versions[wanted])
        mirror.close()
    assert all(memory.readers == 0 for memory in source._memories)


def test_pulls_during_publications_get_the_version_that_they_asked_for() -> None:
    versions = history(12)
    source = WeightSource(capacity=12, num_threads=2)
    source.publish(0, versions[0].items(), run=RUN)
    failures: list[str] = []

    def follow(seed: int) -> None:
        random = np.random.default_rng(seed)
        mirror = WeightMirror(num_threads=1, shares=False)
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
            source.publish(number, versions[number].items(), run=RUN)
        for each in pulls:
            each.result()
    assert failures == []
    source.close()


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(["F32", "BF16", "F16"]), min_size=4, max_size=4),
    fraction=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_any_shapes_and_bits_arrive(shapes: list[list[int]], dtypes: list[Any], fraction: float, seed: int) -> None:
    before = {f"t{index}": tensor(tuple(shape), seed + index, dtypes[index]) for index, shape in enumerate(shapes)}
    after = changed(before, seed, fraction)
    source, mirror = WeightSource(num_threads=1), WeightMirror(num_threads=1, shares=False)
    for number, tensors in enumerate((before, after)):
        source.publish(number, tensors.items(), run=RUN)
        pull(mirror, source, number, tensors)
        assert_equal(mirror.weight_set(), tensors)
    source.close()
    mirror.close()


def test_messages_are_small_and_share_small_tensors(source: WeightSource) -> None:
    tensors = {f"t{index:03}": tensor((1000,), index) for index in range(300)} | {"z": tensor((5 * CHUNK_BYTES,))}
    source.publish(0, tensors.items())
    manifest, *messages = source.stream(WeightsRequest(RUN, 0))
    assert isinstance(manifest, Manifest)
    sizes = [sum(len(chunk.data) for chunk in message) for message in messages]  # type: ignore[union-attr]
    assert max(sizes) <= MESSAGE_DATA
    assert sum(sizes) == manifest.data_bytes == manifest.num_bytes
    assert len(messages) <= manifest.num_bytes / MESSAGE_DATA * 1.5 + 1
    names = [layout.name for layout in manifest.layouts]
    assert combined_digest(dict(zip(names, manifest.digests, strict=True))) == manifest.digest


@pytest.mark.parametrize("ahead", [False, True])
def test_a_source_holds_few_of_the_tensors_that_it_is_given(
    source: WeightSource, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr("quartet.weight_transfer.source.WINDOW_BYTES", 3000)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def made() -> Iterator[tuple[str, HostTensor]]:
        nonlocal most
        for index in range(12):
            each = tensor((250,), index, "F32")
            alive.append(weakref.ref(each.data))
            most = max(most, sum(reference() is not None for reference in alive))
            yield f"t{index:02}", each
            del each

    for version in range(2):
        source.publish(version, made(), run=RUN, ahead=ahead)
    assert most <= 3000 // 1000 + 1


def test_tensors_are_made_ahead_while_those_before_are_hashed(
    source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.weight_transfer.source.WINDOW_BYTES", 4000)
    tensors = {f"t{index}": tensor((250,), index, "F32") for index in range(5)}
    made = [threading.Event() for _ in tensors]
    hashed = source._hash

    def making() -> Iterator[tuple[str, HostTensor]]:
        for event, item in zip(made, tensors.items(), strict=True):
            event.set()
            yield item

    def hashing(parts: Any) -> None:
        for target, _ in parts:
            assert made[min(int(target.layout.name[1:]) + 1, 4)].wait(LIMIT)
        hashed(parts)

    monkeypatch.setattr(source, "_hash", hashing)
    assert source.publish(0, making(), run=RUN, ahead=True) == digest(tensors)


def test_an_error_while_tensors_are_made_ahead_leaves_no_version(source: WeightSource) -> None:
    def failing() -> Iterator[tuple[str, HostTensor]]:
        yield "t0", tensor((250,), 0, "F32")
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        source.publish(0, failing(), run=RUN, ahead=True)
    assert source.versions == ()


def test_a_version_of_the_window_can_be_read_while_newer_ones_are_published(source: WeightSource) -> None:
    versions = history(4)
    for number, tensors in enumerate(versions[:3]):
        source.publish(number, tensors.items(), run=RUN)
    with source.hold(1, digest(versions[1])) as (weights_of_1, digests):
        assert_equal(weights_of_1, versions[1])
        source.publish(3, versions[3].items(), run=RUN)
        assert_equal(weights_of_1, versions[1])
        assert combined_digest(digests) == digest(versions[1])
    with source.hold(3, digest(versions[3])) as (newest, _):
        assert_equal(newest, versions[3])
    assert all(memory.readers == 0 for memory in source._memories)
    with pytest.raises(FailedPrecondition, match="has no version 9"), source.hold(9, digest(versions[1])):
        pass
