"""Tensors whose slices are in the memory of several machines, as rank 0 of a trainer reads them: in windows of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quartet.weight_transfer.messages import CHUNK_BYTES, RankSlices, TensorLayout
from quartet.weight_transfer.process_group import GroupSenders, Place
from quartet.weight_transfer.shared_memory import Memory
from quartet.weight_transfer.tensors import Bytes

WINDOW_BYTES = 2**26
"""Bytes that rank 0 fetches at a time, a multiple of the size of chunks. It has two such windows for each reader."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``begin`` to ``end`` of a tensor."""

    memory: Memory
    begin: int
    end: int


class SliceReader:
    """Reads memory in which rank 0 has the slices of its own machine only. May be used from any thread."""

    def __init__(
        self,
        firsts: Sequence[int] = (0,),
        senders: GroupSenders | None = None,
        host: str = "",
        place: Callable[[Memory, int], tuple[int, int]] | None = None,
    ) -> None:
        """``firsts``: for each rank, the first rank of its machine. By default there is one machine.

        ``senders`` of rank 0, which listens at ``host``; ``place`` returns the region and offset by which the others find a byte
        of memory: needed for several machines.
        """
        self._firsts, self._senders, self._host, self._place = firsts, senders, host, place

    def read_tensors(
        self,
        layouts: Sequence[TensorLayout],
        tensors: Iterable[int],
        *versions: Sequence[Memory],
    ) -> Iterator[tuple[int, int, list[Bytes]]]:
        """Yield the bytes of tensors in parts: index of the tensor, index of the first chunk, and its bytes in each version."""
        cuts = [
            (tensor, begin, min(begin + WINDOW_BYTES, layouts[tensor].num_bytes))
            for tensor in tensors
            for begin in range(0, layouts[tensor].num_bytes, WINDOW_BYTES)
        ]
        data = self.read(Part(memories[tensor], begin, end) for tensor, begin, end in cuts for memories in versions)
        for tensor, begin, _ in cuts:
            yield tensor, begin // CHUNK_BYTES, [next(data) for _ in versions]

    def read(self, parts: Iterable[Part]) -> Iterator[Bytes]:
        """Yield the bytes of parts of tensors: views of memory of this machine, and copies of what others have.

        The copies come in windows, the next one while the caller uses one. Raises ServiceUnavailable if another rank does not
        send.
        """
        if not any(self._firsts):
            yield from (part.memory.data[part.begin : part.end] for part in parts)
            return
        for window in made_ahead(self._windows(parts)):
            yield from window

    def machines(self, part: Part) -> list[tuple[int, int, int]]:
        """Return which machines have a part: the first rank of each, begin and end."""
        pieces: list[tuple[int, int, int]] = []
        for rank, begin, end in sorted(part.memory.slices, key=lambda each: each[1:]):
            first, begin, end = self._firsts[rank], max(begin, part.begin), min(end, part.end)
            if begin >= end:
                continue
            if pieces and pieces[-1][0] == first and pieces[-1][2] == begin:
                begin = pieces.pop()[1]
            pieces.append((first, begin, end))
        return pieces

    def _windows(self, parts: Iterable[Part]) -> Iterator[list[Bytes]]:
        window, size = list[Part](), 0
        for part in parts:
            window.append(part)
            size += part.end - part.begin
            if size >= WINDOW_BYTES:
                yield self._fetch(window)
                window, size = [], 0
        if window:
            yield self._fetch(window)

    def _fetch(self, parts: Sequence[Part]) -> list[Bytes]:
        places, targets = defaultdict[int, list[Place]](list), defaultdict[int, list[Bytes]](list)
        result = []
        for part in parts:
            pieces = self.machines(part)
            if all(first == 0 for first, *_ in pieces):
                result.append(part.memory.data[part.begin : part.end])
                continue
            result.append(data := np.empty(part.end - part.begin, np.uint8))
            for first, begin, end in pieces:
                target = data[begin - part.begin : end - part.begin]
                if first == 0:
                    target[:] = part.memory.data[begin:end]
                else:
                    assert self._place is not None
                    places[first].append((*self._place(part.memory, begin), end - begin))
                    targets[first].append(target)
        if places:
            assert self._senders is not None
            self._senders.fetch(self._host, places, targets)
        return result


def made_ahead(windows: Iterator[Item]) -> Iterator[Item]:
    """Yield windows. The next one is made on another thread while the caller works on one."""
    with ThreadPoolExecutor(1, thread_name_prefix="weights ahead") as pool:
        following = pool.submit(next, windows, None)
        while (window := following.result()) is not None:
            following = pool.submit(next, windows, None)
            yield window


def chunks_of(part: Bytes, first: int) -> Iterator[tuple[int, Bytes]]:
    """Yield the chunks of a part that begins with chunk ``first`` of its tensor, by index."""
    for index, begin in enumerate(range(0, len(part), CHUNK_BYTES), first):
        yield index, part[begin : begin + CHUNK_BYTES]


def rank_slices(memories: Sequence[Memory]) -> tuple[RankSlices, ...]:
    """Return what each rank has of tensors."""
    slices = defaultdict[int, list[tuple[int, int, int]]](list)
    for tensor, memory in enumerate(memories):
        for rank, begin, end in memory.slices or ((0, 0, len(memory.data)),):
            if begin < end:
                slices[rank].append((tensor, begin, end - begin))
    rows = (slices.get(rank, ()) for rank in range(1 + max(slices, default=0)))
    return tuple(RankSlices(*map(tuple, zip(*own, strict=True) if own else ((),) * 3)) for own in rows)
