"""Publications of ranks on several machines: none has the whole weights, and receivers get the bits of one process."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from quartet.errors import OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.weight_transfer import process_group, shared_memory, slice_reader, slices
from quartet.weight_transfer.process_group import GroupSettings, send_slices
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import BLOCK_BYTES, AdapterSettings, Bytes
from tests.unit.weight_transfer.ranks import Cut, Trainer, even, random_cuts
from tests.unit.weight_transfer.samples import (
    RUN,
    Tensors,
    assert_equal,
    history,
    mapped,
    opened,
    pull,
    tensor,
    weights,
)
from tests.unit.weight_transfer.test_process_group import GROUP, QUICK, left, logged
from tests.waiting import wait_until

LAYOUTS = ([0, 1], [0, 0, 2], [0, 1, 1], [0, 1, 2], [0, 0, 2, 2, 4], [0, 1, 0, 1])
"""The first rank on the machine of each rank."""


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def make(firsts: Sequence[int], cut: Cut = even, **settings: Any) -> Trainer:
        trainers.append(Trainer(len(firsts), cut, firsts=firsts, **settings))
        return trainers[-1]

    yield make
    for each in trainers:
        each.close()


@pytest.fixture
def make_mirror() -> Iterator[Callable[..., WeightMirror]]:
    mirrors: list[WeightMirror] = []

    def make(group: GroupSettings | None = None) -> WeightMirror:
        mirrors.append(WeightMirror(num_threads=1, group=group))
        return mirrors[-1]

    yield make
    for each in mirrors:
        each.close()


@pytest.mark.parametrize("firsts", LAYOUTS)
@pytest.mark.parametrize("cut", [even, random_cuts(0), random_cuts(1)])
def test_machines_publish_what_one_process_publishes(
    firsts: list[int], cut: Cut, make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, single = make_trainer(firsts, cut, group=GROUP), WeightSource(num_threads=2)
    chunks, grouped, everything = make_mirror(), make_mirror(GROUP), make_mirror()
    for number, tensors in enumerate(history(4)):
        assert trainer.publish(number, tensors, RUN) == [True] * len(firsts)
        single.publish(number, tensors.items(), run=RUN)
        assert trainer.source.published() == single.published()
        assert trainer.source.tensor_digests() == single.tensor_digests()
        everything.reset()
        chunks.speeds.clear()  # Which of both is faster is a matter of luck here.
        ways = {chunks: "delta" if number else "full", grouped: "process group", everything: "full"}
        for mirror, way in ways.items():
            result = pull(mirror, trainer.source, number, tensors)
            assert result.way == way
            assert_equal(result.weight_set, tensors)
    single.close()


def test_each_machine_touches_only_the_memory_of_its_slices(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    size = 64 * BLOCK_BYTES
    trainer, mirrors = make_trainer([0, 1], group=GROUP), [make_mirror(), make_mirror(GROUP)]
    for number in range(3):
        trainer.publish(number, tensors := {"large": tensor((size // 2,), number)}, RUN)
        for mirror in mirrors:
            assert_equal(pull(mirror, trainer.source, number, tensors).weight_set, tensors)
    regions = [*trainer.source._allocator.regions, *trainer.writers[1]._mirrors]
    # Two versions, of which each machine has half.
    assert [512 * shared_memory.os.fstat(region.fd).st_blocks for region in regions] == [size, size]
    assert all(region.is_sealed for region in regions)


def test_a_publication_sends_only_the_blocks_that_lie_on_two_machines(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def counted(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        sent.append(sum(map(len, parts)))
        send_slices(settings, group, rank, parts)

    monkeypatch.setattr(process_group, "send_slices", counted)
    # Slices of one and a half blocks, and of one.
    tensors = {"large": tensor((10, BLOCK_BYTES // 4)), "other": tensor((6, BLOCK_BYTES // 4))}
    trainer = make_trainer([0, 0, 2, 2])
    trainer.publish(0, tensors, RUN)
    assert sent == []
    assert_published(trainer, tensors)
    trainer = make_trainer([0, 1, 1, 1])
    trainer.publish(0, tensors, RUN)
    assert sent == [BLOCK_BYTES // 2]
    assert_published(trainer, tensors)


def assert_published(trainer: Trainer, tensors: Tensors) -> None:
    single = WeightSource(num_threads=1)
    single.publish(0, tensors.items(), run=RUN)
    assert trainer.source.published() == single.published()
    single.close()


@pytest.mark.parametrize("group", [None, GROUP])
def test_rank_0_never_has_more_than_two_windows_of_other_machines(
    group: GroupSettings | None,
    make_trainer: Callable[..., Trainer],
    make_mirror: Callable[..., WeightMirror],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows: list[int] = []

    def counted(shape: int, dtype: type[np.uint8]) -> Any:
        windows.append(shape)
        return np.zeros(shape, dtype)

    monkeypatch.setattr(slice_reader, "WINDOW_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(slice_reader.np, "empty", counted)
    tensors = {f"{index}": tensor((5, BLOCK_BYTES // 2), index) for index in range(4)}
    trainer = make_trainer([0, 1], group=group)
    trainer.publish(0, tensors, RUN)
    windows.clear()
    assert_equal(pull(make_mirror(group), trainer.source, 0, tensors).weight_set, tensors)
    assert max(windows, default=0) <= 2 * BLOCK_BYTES
    # Through a group, every rank sends what it has.
    assert bool(windows) == (group is None)


def test_an_adapter_alone_comes_as_a_delta_of_what_the_machines_have(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, mirror, ways = make_trainer([0, 1], group=GROUP), make_mirror(GROUP), []
    for number, tensors in enumerate(history(3)):
        trainer.publish(number, tensors, RUN, adapter=AdapterSettings(4, 8.0, ("proj",)))
        result = pull(mirror, trainer.source, number, tensors)
        assert_equal(result.weight_set, tensors)
        ways.append(result.way)
    assert ways == ["process group", "delta", "delta"]


def test_memory_that_one_machine_lacks_is_an_error_that_names_it(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, tensors = make_trainer([0, 0, 2]), {"large": tensor((3, 2**20))}
    # Each rank has two of six MiB.
    for free, missing in ((3 * 2**20, "rank 0, 0.00 GB"), (5 * 2**20, "")):
        with monkeypatch.context() as patch:
            patch.setattr(slices, "free_memory_bytes", lambda free=free: free)
            results = trainer.publish(0, tensors, RUN)
        if missing:
            assert {type(each) for each in results} == {OutOfMemory}
            assert re.search(
                f"0.00 GB of memory are missing for a version on the machine of {missing}", str(results[0])
            )
        else:
            assert results == [True] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_machines_get_the_error_of_one_and_the_next_publication_works(
    failing: int, make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, versions = make_trainer([0, 1, 1]), history(3)
    trainer.publish(0, versions[0], RUN)
    parts = trainer.slices(versions[1])
    parts[failing][1] = slices.TensorSlice(parts[failing][1].layout, 0, 0, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    errors = trainer.publish(1, versions[1], RUN, parts)
    assert {str(each) for each in errors} == {f"weights: rank {failing} of 3: ZeroDivisionError: division by zero"}
    assert {type(each) for each in errors} == {ServiceFailed}
    assert trainer.publish(2, versions[2], RUN) == [True] * 3
    assert_equal(pull(make_mirror(), trainer.source, 2, versions[2]).weight_set, versions[2])


def test_without_memory_that_ranks_share_nothing_is_gathered(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(27, "File too large")

    trainer = make_trainer([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, "ftruncate", refuse)
        errors = trainer.publish(0, weights(), RUN)
    assert {str(each) for each in errors} == {"weights: rank 0 has no memory that the ranks can share"}
    assert trainer.source.versions == ()


def damage(monkeypatch: pytest.MonkeyPatch, flips: dict[int, tuple[int, int]]) -> None:
    """Let the ranks flip one bit each: index of the slice and of the bit."""

    def damaged(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        copies = [part.copy() for part in parts]
        if rank in flips:
            index, bit = flips[rank]
            copies[index][bit // 8] ^= 1 << bit % 8
        send_slices(settings, group, rank, copies)

    monkeypatch.setattr(process_group, "send_slices", damaged)


def test_bits_that_flip_between_machines_are_refused_by_name_100_times_of_100(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, tensors, mirror = np.random.default_rng(0), weights(), make_mirror()
    trainer = make_trainer([0, 1])
    trainer.publish(0, tensors, RUN)
    own = sorted(trainer.slices(tensors)[1], key=lambda part: part.layout.name)
    parts = [part for part in own if part.num_bytes]
    refused = 0
    for _ in range(100):
        index = int(random.integers(len(parts)))
        with monkeypatch.context() as patch:
            damage(patch, {1: (index, int(random.integers(8 * parts[index].num_bytes)))})
            mirror.reset()
            with pytest.raises(ServiceFailed) as raised:
                pull(mirror, trainer.source, 0, tensors)
        refused += str(raised.value) == (
            "actor at local: GetWeights: version 0: 1 tensors have another digest than in the manifest, the first is "
            f"{parts[index].layout.name}"
        )
        assert mirror.weight_set() is None
    assert refused == 100
    assert_equal(pull(mirror, trainer.source, 0, tensors).weight_set, tensors)


def test_bits_that_flip_in_a_delta_are_refused_and_everything_is_asked_for(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, mirror, versions = make_trainer([0, 1]), make_mirror(), history(2)
    trainer.publish(0, versions[0], RUN)
    pull(mirror, trainer.source, 0, versions[0])
    trainer.publish(1, versions[1], RUN)
    with monkeypatch.context() as patch:
        damage(patch, {1: (0, 12345)})
        # Everything is damaged, too.
        with pytest.raises(
            ServiceFailed, match="1 tensors have another digest than in the manifest, the first is model"
        ):
            pull(mirror, trainer.source, 1, versions[1])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError("refused"), "rank 1 did not come: timed out"),
        (None, "rank 1: .*(closed by peer|reset by peer|has ended)"),
    ],
)
def test_a_machine_that_does_not_send_ends_the_stream_in_time_with_its_rank_and_leaves_nothing(
    error: OSError | None,
    reason: str,
    make_trainer: Callable[..., Trainer],
    make_mirror: Callable[..., WeightMirror],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, mirror, tensors = make_trainer([0, 1], fetches=QUICK), make_mirror(), weights()
    trainer.publish(0, tensors, RUN)
    pull(mirror, trainer.source, 0, tensors)
    assert wait_until(lambda: mirror.weight_set() is not None)
    gc.collect()
    before = left()

    def fails(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        if error is not None:
            raise error
        # It dies in the middle of the transfer.
        connection = process_group.socket.create_connection((group.host, group.port))
        connection.sendall(process_group.HELLO.pack(group.name.encode(), rank))
        member = process_group._Member(settings, connection, process_group.TRAINER)
        member.send(parts[0][:100], 1)
        member.close()

    with monkeypatch.context() as patch:
        patch.setattr(process_group, "send_slices", fails)
        mirror.reset()
        with pytest.raises(
            ServiceUnavailable, match=f"^weights: no slices from other machines of the trainer: {reason}"
        ):
            pull(mirror, trainer.source, 0, tensors)
        assert mirror.weight_set() is None
    assert wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True))), (before, left())
    # The source has a copy of nothing, and works as before.
    assert_equal(pull(mirror, trainer.source, 0, tensors).weight_set, tensors)


def test_a_receiver_whose_group_fails_gets_the_slices_of_all_machines_over_grpc(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, mirror, tensors = make_trainer([0, 1], group=QUICK), make_mirror(QUICK), weights()
    trainer.publish(0, tensors, RUN)
    failed: list[str] = []

    def once(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        if rank == 1 and not failed:
            failed.append(group.name)
            raise ConnectionRefusedError("refused")
        send_slices(settings, group, rank, parts)

    monkeypatch.setattr(process_group, "send_slices", once)
    result, reasons = logged(lambda: pull(mirror, trainer.source, 0, tensors))
    assert (result.way, reasons) == ("full", ["actor at local: process group: rank 1 did not come: timed out"])
    assert_equal(result.weight_set, tensors)


def test_a_receiver_on_loopback_that_other_machines_cannot_reach_gets_chunks(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, tensors = make_trainer([0, 1], group=GROUP), weights()
    trainer.publish(0, tensors, RUN)
    monkeypatch.setattr(trainer.writers[0], "_host", "10.0.0.1")
    result, reasons = logged(lambda: pull(make_mirror(GROUP), trainer.source, 0, tensors))
    assert (result.way, reasons) == ("full", [])


def test_too_many_transfers_of_a_rank_do_not_refuse_what_rank_0_reads(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "MAX_SENDS", 0)
    trainer, tensors = make_trainer([0, 1], group=GROUP), weights()
    trainer.publish(0, tensors, RUN)
    assert pull(make_mirror(GROUP), trainer.source, 0, tensors).way == "full"


def test_a_receiver_that_goes_in_the_middle_touches_no_publication(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_reader, "WINDOW_BYTES", BLOCK_BYTES)
    trainer, versions = make_trainer([0, 1]), history(6)
    for number, tensors in enumerate(versions):
        trainer.publish(number, tensors, RUN)
        stream = trainer.source.stream(slices_request(number))
        next(stream), next(stream)
        with suppress(QuartetError):
            stream.close()
        assert_equal(pull(make_mirror(), trainer.source, number, tensors).weight_set, tensors)
    assert not any(memory.readers for memory in trainer.source._memories)


def slices_request(version: int) -> Any:
    from quartet.weight_transfer.messages import WeightsRequest

    return WeightsRequest(RUN, version)


def test_nothing_is_left_of_several_machines() -> None:
    gc.collect()  # What earlier tests have left in cycles.
    before = opened(), mapped()
    trainer = Trainer(3, firsts=[0, 1, 1])
    trainer.publish(0, weights(), RUN)
    assert mapped() == before[1] + 3
    trainer.close()
    del trainer
    gc.collect()
    assert wait_until(lambda: (opened(), mapped()) == before)
