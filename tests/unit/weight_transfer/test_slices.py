"""Publications of ranks that hold slices of the tensors: the same weights and digests as by one process."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any

import pytest

from quartet.errors import InvalidRequest, OutOfMemory, ServiceFailed, ServiceUnavailable
from quartet.weight_transfer import shared_memory, slices
from quartet.weight_transfer.mapped_regions import map_for_writing
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.shared_memory import SharedRegion
from quartet.weight_transfer.slices import TensorSlice
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import BLOCK_BYTES, PIECE_BYTES, Bytes
from tests.unit.weight_transfer.ranks import Cut, Trainer, even, random_cuts
from tests.unit.weight_transfer.samples import (
    RUN,
    assert_equal,
    changed,
    digest,
    history,
    mapped,
    opened,
    pull,
    tensor,
    weights,
)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("cut", [even, *map(random_cuts, range(4))])
def test_ranks_publish_what_one_process_publishes(size: int, cut: Cut, mapping_mirror: WeightMirror) -> None:
    trainer, single, chunks = Trainer(size, cut), WeightSource(num_threads=2), WeightMirror(num_threads=1, shares=False)
    for number, tensors in enumerate(history(4)):
        assert trainer.publish(number, tensors, RUN) == [True] * size
        single.publish(number, tensors.items(), run=RUN)
        assert trainer.source.published() == single.published()
        assert trainer.source.tensor_digests() == single.tensor_digests()
        assert_equal(pull(mapping_mirror, trainer.source, number, tensors).weight_set, tensors)
        mapping_mirror.release()
        result = pull(chunks, trainer.source, number, tensors)
        assert result.way == ("delta" if number else "full")
        assert_equal(result.weight_set, tensors)
    chunks.close()
    single.close()
    trainer.close()


def test_slices_that_share_a_block_or_have_several_pieces_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "PIECE_BYTES", 2 * BLOCK_BYTES)
    assert PIECE_BYTES > 2 * BLOCK_BYTES
    # Several ranks have parts of one block, and one rank has several pieces.
    tensors = {"small": tensor((7, 3)), "large": tensor((11 * BLOCK_BYTES // 4 + 5, 2))}
    for cut in (even, lambda each, size: [(0, 2), (2, 4), (4, len(each.data))]):
        trainer = Trainer(3, cut)
        trainer.publish(0, tensors)
        assert_equal(trainer.source.weight_set(), tensors)
        trainer.close()


def test_what_never_changes_has_one_place_and_is_not_written_again() -> None:
    trainer, first = Trainer(3), weights()
    trainer.publish(0, first)
    (region,) = trainer.source._allocator.regions
    used = region.used
    for number in range(1, 4):
        tensors = changed(first, number, 0.5, "model.norm.weight")
        trainer.publish(number, tensors)
        assert_equal(trainer.source.weight_set(), tensors)
    assert region.used - used == first["model.norm.weight"].data.nbytes
    trainer.close()


def test_a_version_stays_as_it_is_while_it_is_read(mapping_mirror: WeightMirror) -> None:
    trainer, versions = Trainer(2), history(6)
    trainer.publish(0, versions[0], RUN)
    result = pull(mapping_mirror, trainer.source, 0, versions[0])
    for number in range(1, 6):
        trainer.publish(number, versions[number], RUN)
        assert_equal(result.weight_set, versions[0])
    mapping_mirror.release()
    assert_equal(pull(mapping_mirror, trainer.source, 5, versions[5]).weight_set, versions[5])
    trainer.close()


def test_nobody_else_can_map_the_memory_for_writing(mapping_mirror: WeightMirror) -> None:
    trainer, tensors = Trainer(2), weights()
    trainer.publish(0, tensors, RUN)
    assert pull(mapping_mirror, trainer.source, 0, tensors).way == "shared memory"
    (region,) = trainer.source._allocator.regions
    with pytest.raises(ServiceUnavailable, match="cannot map the shared memory"):
        map_for_writing(SharedRegion(shared_memory.os.getpid(), region.fd, len(region.data)))
    trainer.close()


def test_generators_that_must_not_share_get_chunks_of_ranks_that_do(mapping_mirror: WeightMirror) -> None:
    trainer, tensors = Trainer(2, shares=False), weights()
    trainer.publish(0, tensors, RUN)
    assert pull(mapping_mirror, trainer.source, 0, tensors).way == "full"
    trainer.close()


def test_without_memory_that_the_ranks_share_they_are_told_to_make_whole_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(27, "File too large")

    trainer, tensors = Trainer(2), weights()
    monkeypatch.setattr(shared_memory.os, "ftruncate", refuse)
    assert trainer.publish(0, tensors) == [False, False]
    trainer.source.publish(0, tensors.items())
    assert_equal(trainer.source.weight_set(), tensors)
    trainer.close()


def test_all_ranks_get_the_error_of_one_and_the_next_publication_works(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, tensors = Trainer(3), weights()

    def fail() -> Bytes:
        raise InvalidRequest("damaged")

    for failing in range(3):
        parts = trainer.slices(tensors)
        parts[failing][1] = replace(parts[failing][1], read=fail)
        errors = trainer.publish(0, tensors, slices=parts)
        assert [(type(each), str(each)) for each in errors] == 3 * [
            (ServiceFailed, f"weights: rank {failing} of 3: damaged")
        ]
        assert trainer.source.versions == ()
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "free_memory_bytes", lambda: 0)
        patch.setattr(trainer.source, "_allocator", shared_memory.Allocator(seals=False))
        errors = trainer.publish(0, tensors)
    assert {type(each) for each in errors} == {OutOfMemory}
    assert trainer.publish(0, tensors) == [True, True, True]
    assert_equal(trainer.source.weight_set(), tensors)
    trainer.close()


@pytest.mark.parametrize("error", [ServiceUnavailable("cannot map"), IndexError("out of range")])
def test_after_a_rank_could_not_map_the_memory_the_next_publication_works(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MIN_REGION_BYTES", 2**20)
    trainer, reads = Trainer(3), list[str]()

    def once(region: SharedRegion) -> Bytes:
        monkeypatch.setattr(slices, "map_for_writing", map_for_writing)
        raise error

    def counted(part: TensorSlice) -> TensorSlice:
        return replace(part, read=lambda: reads.append(part.layout.name) or part.read())  # type: ignore[func-returns-value]

    text = str(error) if isinstance(error, ServiceUnavailable) else f"IndexError: {error}"
    # The second version needs another region.
    for number, tensors in enumerate([weights(), weights() | {"model.large": tensor((2**22,))}]):
        for _ in range(2):
            monkeypatch.setattr(slices, "map_for_writing", once)
            parts = [[counted(part) for part in each] for each in trainer.slices(tensors)]
            errors = trainer.publish(number, tensors, RUN, parts)
            assert {re.sub("rank [12]", "rank", str(each)) for each in errors} == {f"weights: rank of 3: {text}"}
            # Reading may need all ranks, so none has begun.
            assert not reads
        assert trainer.publish(number, tensors, RUN) == [True, True, True]
        assert_equal(trainer.source.weight_set(), tensors)
        reads.clear()
    trainer.close()


def test_a_rank_that_fails_still_reads_what_the_others_read_and_its_error_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, tensors, reads = Trainer(2), weights(), list[str]()

    def counted(part: TensorSlice) -> TensorSlice:
        def read() -> Bytes:
            reads.append(part.layout.name)
            if len(reads) == 2:
                raise ZeroDivisionError("of a module")
            return part.read()

        return replace(part, read=read)

    own, other = trainer.slices(tensors)
    errors = trainer.publish(0, tensors, slices=[own, [counted(part) for part in other]])
    assert {str(each) for each in errors} == {"weights: rank 1 of 2: ZeroDivisionError: of a module"}
    assert reads == list(tensors)
    # An error of rank 0 outside what the ranks do ends their call, too.
    with monkeypatch.context() as patch:
        patch.setattr(trainer.source, "_spare", lambda _: 1 // 0)
        trainer.publish(0, tensors, RUN)
        errors = trainer.publish(1, tensors, RUN)
    assert [type(each) for each in errors] == [ZeroDivisionError, ServiceFailed]
    assert trainer.publish(1, tensors, RUN) == [True, True]
    trainer.close()


@pytest.mark.parametrize("shift", [(-2, 0), (0, -2), (2, 0)])
def test_slices_that_leave_a_gap_or_overlap_are_refused(shift: tuple[int, int]) -> None:
    trainer, tensors = Trainer(2), {"model.proj.weight": tensor((300, 70))}
    parts = trainer.slices(tensors)
    (whole,) = tensors.values()
    (second,) = parts[1]
    begin, end = second.begin + shift[0], second.begin + second.num_bytes + shift[1]
    parts[1] = [TensorSlice(second.layout, begin, end - begin, lambda: whole.data[begin:end])]
    errors = trainer.publish(0, tensors, slices=parts)
    assert {str(each) for each in errors} == {
        "weights: model.proj.weight: the ranks have other slices than the whole tensor"
    }
    trainer.close()


def test_nothing_is_left() -> None:
    gc.collect()  # What earlier tests have left in cycles.
    before = opened(), mapped()
    trainer = Trainer(3)
    trainer.publish(0, weights())
    assert mapped() == before[1] + 3
    trainer.close()
    del trainer
    gc.collect()
    assert (opened(), mapped()) == before


def test_a_digest_is_that_of_the_tensors() -> None:
    trainer, tensors = Trainer(2), weights()
    trainer.publish(3, tensors)
    assert trainer.source.published() == {3: digest(tensors)}
    trainer.close()
