"""A publication by several ranks: each writes the slices of tensors that it holds into memory that its machine's ranks share.

So the weights are in memory once, and no rank receives what another one holds. Each machine has the regions of rank 0's weight
source, in which only the pages of its own slices take memory.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from quartet.config.section import is_loopback
from quartet.errors import OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.system.machine import available_cores, free_memory_bytes
from quartet.weight_transfer.mapped_regions import map_for_writing
from quartet.weight_transfer.messages import TensorLayout
from quartet.weight_transfer.process_group import GroupSenders
from quartet.weight_transfer.shared_memory import Allocator, Memory, Region, SharedRegion, Slices
from quartet.weight_transfer.slice_reader import Part, SliceReader
from quartet.weight_transfer.tensors import BLOCK_BYTES, DIGEST_BYTES, PIECE_BYTES, Bytes, block_digests

log = structlog.get_logger()

WINDOW_BYTES = 2**28
"""Bytes of slices that a rank copies at a time, so that several threads have work."""
_REPORT = 5
"""Numbers of a report for each tensor: see ``_Task.report``."""


class Ranks(Protocol):
    """The ranks of a trainer. All of them make the same calls in the same order."""

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank on rank 0, on the others nothing."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What this rank writes of a tensor: ``num_bytes`` from byte ``begin`` on.

    ``read`` returns them, uint8 [num_bytes]. All ranks call it for every tensor in the same order, because it may need all.
    """

    layout: TensorLayout
    begin: int
    num_bytes: int
    read: Callable[[], Bytes]


Target = tuple[Bytes, bool] | None
"""Memory of a whole tensor, and whether to write to it; otherwise it is only compared. None: there is nothing to do."""


class SliceWriter:
    """The work of one rank in publications. Use it from the thread on which the ranks exchange data."""

    def __init__(
        self,
        ranks: Ranks,
        num_threads: int | None = None,
        firsts: Sequence[int] = (),
        senders: GroupSenders | None = None,
        host: str = "",
    ) -> None:
        """``num_threads`` defaults to the cores. ``firsts``: the first rank on each rank's machine; by default all share one.

        ``senders`` and ``host``: with several machines, how rank 0 reads what the others have, see ``SliceReader``.
        """
        self.ranks = ranks
        self._firsts = list(firsts) or [0] * ranks.size
        self._first = self._firsts[ranks.rank]
        self.is_spread = any(self._firsts)
        """The ranks are on several machines."""
        self.senders, self._host = senders, host
        self.reader = SliceReader(self._firsts, senders, host, self.place)
        self._pool = ThreadPoolExecutor(num_threads or available_cores(), thread_name_prefix="weight slices")
        # Regions by number, which none gets again: on the other ranks as they are mapped, and on rank 0.
        self._maps: dict[int, Bytes] = {}
        self._regions: dict[Region, int] = {}
        self._count = 0
        # On the first rank of another machine, its own regions.
        self._mirrors: list[Region] = []

    def reaches(self, host: str) -> bool:
        """Return whether all ranks can connect to ``host``, which rank 0 can: loopback is another host on every machine."""
        return not self.is_spread or not is_loopback(host) or is_loopback(self._host)

    def allocator(self) -> Allocator:
        """Return an allocator of memory that the ranks write. On several machines, see ``check_memory``."""
        return Allocator(seals=False, checks=not self.is_spread)

    def follow(self, slices: Sequence[TensorSlice]) -> bool:
        """Do what rank 0 asks for in one publication. Return False if it wants whole tensors instead.

        Raises the errors that all ranks have.
        """
        while True:
            plan = json.loads(self.ranks.broadcast(b""))
            if "error" in plan:
                self._maps, self._mirrors = {}, []
                raise (OutOfMemory if plan["kind"] == "OutOfMemory" else ServiceFailed)(plan["error"])
            if "end" in plan:
                return bool(plan["end"])
            self.ranks.gather(self._attempt(partial(self._follow, plan, slices)))

    def _follow(self, plan: dict[str, Any], slices: Sequence[TensorSlice]) -> bytes:
        if "memory" in plan:
            held = sum(part.num_bytes for part in slices), sum(part.layout.num_bytes for part in slices)
            return json.dumps([*held, free_memory_bytes()]).encode()
        if "create" in plan:
            return self._mirror(plan["create"]) if self._first == self.ranks.rank else b""
        if "regions" in plan:
            if self._first != self.ranks.rank:
                regions = plan["regions"][str(self._first)]
                self._maps |= {number: map_for_writing(SharedRegion(*each)) for number, *each in regions}
            return b""
        if "blocks" in plan:
            places = plan["blocks"].get(str(self.ranks.rank), ())
            return b"".join(self._pool.map(block_digests, [self.memory(*place) for place in places]))
        for region in self._mirrors:
            if not region.is_sealed:
                region.seal()
        return self._write(slices, [self._target(*each) for each in zip(plan["places"], slices, strict=True)])

    def _mirror(self, wanted: Sequence[tuple[int, int]]) -> bytes:
        """Make regions of these numbers and sizes in bytes. Return how the other ranks of this machine map them."""
        made = []
        for number, size in wanted:
            self._mirrors.append(region := Region(size, seals=False))
            self._maps[number] = region.data
            made.append((number, os.getpid(), region.fd, size))
        return json.dumps(made).encode()

    def _target(self, place: list[int] | None, part: TensorSlice) -> Target:
        if place is None:
            return None
        region, offset, writes = place
        return self._maps[region][offset : offset + part.layout.num_bytes], bool(writes)

    def lead(self, slices: Sequence[TensorSlice], targets: Sequence[tuple[Memory, bool] | None]) -> list[Report]:
        """Let every rank write its slices, or compare them. Return one report for each tensor. Rank 0 calls it.

        Raises ServiceFailed if a rank fails, or if the slices are not whole tensors.
        """
        used = dict.fromkeys(target[0].region for target in targets if target is not None)
        new = [region for region in used if region is not None and region not in self._regions]
        if new:
            # In an exchange of its own: a rank that fails after others have begun to read tensors would leave them waiting.
            self._share(new)
        places = [
            None
            if target is None or target[0].region is None
            else (self._regions[target[0].region], target[0].offset, target[1])
            for target in targets
        ]
        self.ranks.broadcast(json.dumps({"places": places}).encode())
        own = [None if target is None else (target[0].data, target[1]) for target in targets]
        reports = self.ranks.gather(self._attempt(lambda: self._write(slices, own)))
        result, missing = _merged(_checked(reports), [each.layout for each in slices], own)
        for report, target in zip(result, targets, strict=True):
            if target is not None and target[1]:
                target[0].slices = report.slices
        self._hash_joints(result, missing, targets)
        return result

    def _hash_joints(
        self,
        reports: Sequence[Report],
        missing: Sequence[tuple[int, int, int]],
        targets: Sequence[tuple[Memory, bool] | None],
    ) -> None:
        """Hash the blocks that several ranks share: on their machine, or here if they have parts on several.

        ``missing``: index of the tensor, and begin and end of the block.
        """
        here, elsewhere = list[tuple[int, Part]](), defaultdict[int, list[tuple[int, Part]]](list)
        for tensor, begin, end in missing:
            target = targets[tensor]
            assert target is not None
            part = Part(target[0], begin, end)
            machines = {first for first, *_ in self.reader.machines(part)}
            (elsewhere[machines.pop()] if len(machines) == 1 and 0 not in machines else here).append((tensor, part))
        if elsewhere:
            places = {
                rank: [(*self.place(part.memory, part.begin), part.end - part.begin) for _, part in parts]
                for rank, parts in elsewhere.items()
            }
            self.ranks.broadcast(json.dumps({"blocks": places}).encode())
            found = _checked(self.ranks.gather(self._attempt(bytes)))
            for rank, parts in elsewhere.items():
                for index, (tensor, part) in enumerate(parts):
                    reports[tensor].put(part.begin, found[rank][1 + index * DIGEST_BYTES :][:DIGEST_BYTES])
        for (tensor, part), data in zip(here, self.reader.read(part for _, part in here), strict=True):
            reports[tensor].put(part.begin, block_digests(data))

    def check_memory(self, num_bytes: int) -> None:
        """Raise OutOfMemory if a machine of several has less free memory than its share of new tensors of so many bytes."""
        if not self.is_spread:
            return
        self.ranks.broadcast(json.dumps({"memory": num_bytes}).encode())
        own = json.dumps([0, 0, free_memory_bytes()]).encode()
        reports = [json.loads(each[1:]) for each in _checked(self.ranks.gather(self._attempt(lambda: own)))]
        whole = max(total for _, total, _ in reports)
        # The slices are whole tensors, so rank 0 has the rest.
        reports[0][0] = whole - sum(held for held, *_ in reports)
        for first in dict.fromkeys(self._firsts):
            held = sum(report[0] for report, other in zip(reports, self._firsts, strict=True) if other == first)
            needed, free = num_bytes * held / max(1, whole), reports[first][2]
            if needed > free:
                raise OutOfMemory(
                    f"weights: {needed / 1e9:.2f} GB of memory are missing for a version on the machine of rank {first}, "
                    f"{free / 1e9:.2f} GB are free; give that machine or container more memory"
                )

    def _share(self, regions: Sequence[Region]) -> None:
        """Let the other ranks map regions, then seal them."""
        numbers = {region: self._count + index for index, region in enumerate(regions)}
        self._count += len(numbers)
        plan = {0: [(number, os.getpid(), region.fd, len(region.data)) for region, number in numbers.items()]}
        if self.is_spread:
            wanted = [(number, len(region.data)) for region, number in numbers.items()]
            self.ranks.broadcast(json.dumps({"create": wanted}).encode())
            made = _checked(self.ranks.gather(self._attempt(bytes)))
            plan |= {rank: json.loads(each[1:]) for rank, each in enumerate(made) if len(each) > 1}
        self.ranks.broadcast(json.dumps({"regions": plan}).encode())
        _checked(self.ranks.gather(self._attempt(bytes)))
        for region in regions:
            region.seal()
        self._regions |= numbers

    def memory(self, region: int, offset: int, num_bytes: int) -> Bytes:
        """Return a part of a region, on a rank above 0. May be called from any thread.

        Raises KeyError for a region that is not used any more.
        """
        return self._maps[region][offset : offset + num_bytes]

    def place(self, memory: Memory, begin: int) -> tuple[int, int]:
        """Return the region and offset by which the other ranks find byte ``begin`` of memory. Rank 0 calls it, on any thread.

        Raises ServiceUnavailable for memory of a region that is not used any more.
        """
        number = None if memory.region is None else self._regions.get(memory.region)
        if number is None:
            raise ServiceUnavailable(
                "weights: a publication has failed, the ranks do not have the versions before it any more"
            )
        return number, memory.offset + begin

    def end(self, sliced: bool = True, error: Exception | None = None) -> None:
        """End a publication on all ranks, with an error if there is one. Rank 0 calls it.

        After an error, the ranks may differ in what they have mapped. So all forget it, and the next publication needs memory of
        other regions.
        """
        plan: dict[str, Any] = {"end": sliced}
        if error is not None:
            self._regions = {}
            plan = {"error": _text(error), "kind": type(error).__name__}
        self.ranks.broadcast(json.dumps(plan).encode())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._maps, self._regions, self._mirrors = {}, {}, []

    @staticmethod
    def _attempt(work: Callable[[], bytes]) -> bytes:
        """Return the report of ``work``, after a zero byte, or its error after a one: the other ranks wait for either."""
        try:
            return b"\0" + work()
        except Exception as error:
            return b"\1" + _text(error).encode()

    def _write(self, slices: Sequence[TensorSlice], targets: Sequence[Target]) -> bytes:
        """Write or compare all slices. Return the report."""
        tasks, waiting, size = list[_Task](), deque[tuple[int, list[Future[Any]]]](), 0
        reads = iter([part.read for part, target in zip(slices, targets, strict=True) if target is not None])
        try:
            for part, target in zip(slices, targets, strict=True):
                tasks.append(task := _Task(part, target))
                if target is None:
                    continue
                while size > WINDOW_BYTES:
                    done, futures = waiting.popleft()
                    size -= done
                    for future in futures:
                        future.result()
                data = next(reads)()
                waiting.append((len(data), [self._pool.submit(work) for work in task.pieces(data)]))
                size += len(data)
                del data
            for _, futures in waiting:
                for future in futures:
                    future.result()
        except Exception:
            # The other ranks may need this one to read the tensors that they read.
            for read in reads:
                with suppress(Exception):
                    read()
            raise
        finally:
            for _, futures in waiting:
                for future in futures:
                    if not future.cancel():
                        future.exception()
        numbers = np.array([task.report() for task in tasks], "<i8").reshape(-1, _REPORT)
        return numbers.tobytes() + b"".join(task.joined() for task in tasks)


class _Task:
    """The work of one rank for one tensor."""

    def __init__(self, part: TensorSlice, target: Target) -> None:
        self._part, self._target = part, target
        self._differs = False
        end, total = part.begin + part.num_bytes, part.layout.num_bytes
        # The blocks that lie in the slice. Others are hashed when all ranks have written, see ``_hash_joints``.
        self._first = -(-part.begin // BLOCK_BYTES)
        self._last = max(self._first, -(-end // BLOCK_BYTES) if end == total else end // BLOCK_BYTES)
        if target is None or not target[1] or not part.num_bytes:
            self._last = self._first
        self._digests: dict[int, bytes] = {}

    def report(self) -> tuple[int, ...]:
        """Return the range in bytes, whether it differs, and the range of the blocks with digests."""
        begin = self._part.begin
        return begin, begin + self._part.num_bytes, int(self._differs), self._first, self._last

    def joined(self) -> bytes:
        """Return the digests of the blocks."""
        return b"".join(self._digests[begin] for begin in sorted(self._digests))

    def pieces(self, data: Bytes) -> Iterator[Callable[[], None]]:
        """Yield functions that write or compare parts of the slice, on any thread."""
        assert self._target is not None
        memory, writes = self._target
        target = memory[self._part.begin : self._part.begin + len(data)]
        if not writes:
            yield lambda: self._compare(data, target)
            return
        head = self._first * BLOCK_BYTES - self._part.begin
        tail = self._last * BLOCK_BYTES - self._part.begin
        if self._first == self._last:
            yield lambda: np.copyto(target, data)
            return
        if head:
            yield lambda: np.copyto(target[:head], data[:head])
        if tail < len(data):
            yield lambda: np.copyto(target[tail:], data[tail:])
        for begin in range(head, min(tail, len(data)), PIECE_BYTES):
            end = min(begin + PIECE_BYTES, tail, len(data))
            yield partial(self._copy, begin, data[begin:end], target[begin:end])

    def _copy(self, begin: int, data: Bytes, target: Bytes) -> None:
        self._digests[begin] = block_digests(data, target)

    def _compare(self, data: Bytes, target: Bytes) -> None:
        self._differs = any(
            not np.array_equal(data[begin : begin + BLOCK_BYTES], target[begin : begin + BLOCK_BYTES])
            for begin in range(0, len(data), BLOCK_BYTES)
        )


@dataclass(slots=True)
class Report:
    """What the ranks did for one tensor.

    ``differs``: whether it differs from the memory. ``blocks``: the digests of its blocks, if it was written.
    """

    differs: bool
    slices: Slices
    blocks: bytearray

    def put(self, begin: int, digest: bytes) -> None:
        """Set the digest of the block that begins at this byte."""
        at = begin // BLOCK_BYTES * DIGEST_BYTES
        self.blocks[at : at + DIGEST_BYTES] = digest


def _text(error: Exception) -> str:
    """Return the text of an error, of one that nobody expects with its class."""
    if isinstance(error, QuartetError | MemoryError):
        return str(error) or type(error).__name__
    log.error("weights: this rank has failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _checked(reports: Sequence[bytes]) -> Sequence[bytes]:
    """Return the reports. Raises ServiceFailed if a rank has failed."""
    for rank, report in enumerate(reports):
        if report[:1] != b"\0":
            raise ServiceFailed(f"weights: rank {rank} of {len(reports)}: {report[1:].decode(errors='replace')}")
    return reports


def _merged(
    reports: Sequence[bytes], layouts: Sequence[TensorLayout], targets: Sequence[Target]
) -> tuple[list[Report], list[tuple[int, int, int]]]:
    """Return what the ranks did for each tensor, and the blocks without a digest: index of the tensor, begin and end."""
    numbers: list[NDArray[np.int64]] = []
    digests: list[memoryview] = []
    for report in reports:
        size = 8 * _REPORT * len(layouts)
        numbers.append(np.frombuffer(report, "<i8", size // 8, offset=1).reshape(-1, _REPORT))
        digests.append(memoryview(report)[1 + size :])
    result: list[Report] = []
    joints = []
    at = [0] * len(reports)
    for index, (layout, target) in enumerate(zip(layouts, targets, strict=True)):
        rows = [each[index] for each in numbers]
        done = 0
        for begin, end, *_ in sorted((int(row[0]), int(row[1])) for row in rows):
            if begin != end and begin != done:
                break
            done = max(done, end)
        if done != layout.num_bytes:
            raise ServiceFailed(f"weights: {layout.name}: the ranks have other slices than the whole tensor")
        ranges = tuple((rank, int(row[0]), int(row[1])) for rank, row in enumerate(rows) if row[0] != row[1])
        result.append(Report(any(row[2] for row in rows), ranges, bytearray()))
        if target is None or not target[1]:
            continue
        blocks = bytearray(-(-layout.num_bytes // BLOCK_BYTES) * DIGEST_BYTES)
        missing = np.ones(len(blocks) // DIGEST_BYTES, np.bool_)
        for rank, row in enumerate(rows):
            first, last = int(row[3]), int(row[4])
            count = (last - first) * DIGEST_BYTES
            blocks[first * DIGEST_BYTES : last * DIGEST_BYTES] = digests[rank][at[rank] : at[rank] + count]
            at[rank] += count
            missing[first:last] = False
        result[-1].blocks = blocks
        starts = (BLOCK_BYTES * np.flatnonzero(missing)).tolist()
        joints += [(index, begin, min(begin + BLOCK_BYTES, layout.num_bytes)) for begin in starts]
    return result, joints
