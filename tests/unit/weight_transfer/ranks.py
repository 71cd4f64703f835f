"""Ranks of a trainer as threads, each with its slices of the same tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch._C._distributed_c10d import TCPStore

from quartet.weight_transfer.messages import TensorLayout
from quartet.weight_transfer.process_group import GroupSenders, GroupSettings
from quartet.weight_transfer.slices import SliceWriter, TensorSlice
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor
from tests.waiting import LIMIT

FETCHES = GroupSettings(timeout=30.0)


class ThreadRank:
    """One of several ranks in this process."""

    def __init__(self, rank: int, size: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def _exchange(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(LIMIT)
        result = list(self._board)
        self._barrier.wait(LIMIT)
        return result

    def broadcast(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def gather(self, data: bytes) -> list[bytes]:
        every = self._exchange(data)
        return [] if self.rank else every


Cut = Callable[[HostTensor, int], Sequence[tuple[int, int]]]
"""Function that returns the slice of each rank in bytes, for a number of ranks."""


def even(tensor: HostTensor, size: int) -> list[tuple[int, int]]:
    """Cut the first dimension as FSDP does: the last ranks may have less, or nothing."""
    rows = tensor.shape[0] if tensor.shape else 1
    step, row = -(-rows // size), len(tensor.data) // rows if rows else 0
    return [(min(rows, rank * step) * row, min(rows, (rank + 1) * step) * row) for rank in range(size)]


def random_cuts(seed: int) -> Cut:
    """Return a function that cuts at random elements, also into empty slices."""
    random = np.random.default_rng(seed)

    def cut(tensor: HostTensor, size: int) -> list[tuple[int, int]]:
        item = ITEM_BYTES[tensor.dtype]
        places = sorted(item * int(each) for each in random.integers(0, len(tensor.data) // item + 1, size - 1))
        return list(zip([0, *places], [*places, len(tensor.data)], strict=True))

    return cut


class Trainer:
    """``size`` ranks, of which rank 0 has the source."""

    def __init__(
        self,
        size: int,
        cut: Cut = even,
        group: GroupSettings | None = None,
        firsts: Sequence[int] = (),
        fetches: GroupSettings = FETCHES,
        **settings: Any,
    ) -> None:
        """``group``: the ranks also send through process groups. ``firsts``: the first rank on the machine of each rank.

        ``fetches``: how rank 0 reads from other machines. ``settings`` of the source.
        """
        self.size, self._cut = size, cut
        board, barrier = [b""] * size, threading.Barrier(size)
        self.senders: list[GroupSenders] = []
        if group is not None or any(firsts):
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.senders = [GroupSenders(group or fetches, rank, size, self._store.clone()) for rank in range(size)]
        self.writers = [
            SliceWriter(
                ThreadRank(rank, size, board, barrier),
                2,
                firsts,
                self.senders[rank] if self.senders else None,
                "127.0.0.1",
            )
            for rank in range(size)
        ]
        for writer, senders in zip(self.writers[1:], self.senders[1:], strict=False):
            senders.follow(writer.memory)
        first = None if group is None else self.senders[0]
        self.source = WeightSource(num_threads=2, writer=self.writers[0], senders=first, **settings)
        self._threads = ThreadPoolExecutor(size)

    def slices(self, tensors: Mapping[str, HostTensor]) -> list[list[TensorSlice]]:
        """Return the slices of each rank."""
        result: list[list[TensorSlice]] = [[] for _ in range(self.size)]
        for name, tensor in tensors.items():
            for rank, (begin, end) in enumerate(self._cut(tensor, self.size)):
                data = tensor.data[begin:end]
                result[rank].append(
                    TensorSlice(TensorLayout.of(name, tensor), begin, end - begin, lambda data=data: data)
                )  # type: ignore[misc]
        return result

    def publish(
        self,
        version: int,
        tensors: Mapping[str, HostTensor],
        run: str = "",
        slices: list[list[TensorSlice]] | None = None,
        adapter: AdapterSettings | None = None,
    ) -> list[Any]:
        """Publish a version. Return what each rank returned or raised."""
        own, *others = self.slices(tensors) if slices is None else slices
        calls = [
            self._threads.submit(writer.follow, part) for writer, part in zip(self.writers[1:], others, strict=True)
        ]
        calls.insert(0, self._threads.submit(self.source.publish_slices, version, own, adapter, run))
        return [call.exception(LIMIT) or call.result() for call in calls]

    def close(self) -> None:
        self.source.close()
        if self.senders:
            self.senders[0].close()
        for writer in self.writers:
            writer.close()
        self._threads.shutdown()
        if self.senders:
            del self._store
