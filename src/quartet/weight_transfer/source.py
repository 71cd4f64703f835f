"""The weights that a trainer publishes, version after version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quartet.contract.weights import PublishedWeights
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.system.machine import available_cores
from quartet.weight_transfer.cuda_ipc import CudaRuntime, DeviceCopy
from quartet.weight_transfer.delta import encode
from quartet.weight_transfer.messages import (
    Chunk,
    Encoding,
    Manifest,
    Message,
    TensorLayout,
    WeightGroup,
    WeightsRequest,
    grouped,
)
from quartet.weight_transfer.process_group import GroupSenders
from quartet.weight_transfer.shared_memory import Memory
from quartet.weight_transfer.slice_reader import SliceReader, chunks_of, made_ahead, rank_slices
from quartet.weight_transfer.slices import SliceWriter, TensorSlice
from quartet.weight_transfer.store import Messages, Version, WeightStore, version_of
from quartet.weight_transfer.tensors import (
    ITEM_BYTES,
    AdapterSettings,
    Bytes,
    HostTensor,
    WeightSet,
    Window,
    joined_digest,
    tensor_digests,
    windows_of,
)

_ChunkPair = tuple[int, TensorLayout, int, Bytes, Bytes]
"""Index and layout of a tensor, index of a chunk, and its bytes before and after."""
WINDOW_BYTES = 2**30
"""Bytes of tensors that are hashed and copied together, so that several threads have work."""
ENCODED_CHUNKS = 512
"""Chunks of a delta that are encoded together, for the same reason."""


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor of a publication.

    ``memory``: where its bytes are, or will be copied to; None as long as it may be unchanged. ``before``: the same tensor in the
    publication before, if its layout was the same.
    """

    layout: TensorLayout
    memory: Memory | None
    digest: bytes = b""
    before: _Tensor | None = None

    @property
    def is_changed(self) -> bool:
        return self.before is None or self.before.digest != self.digest


class WeightSource(WeightStore):
    """Weights of the versions that a trainer has published.

    Every version of the window is in memory, where processes can read it. A tensor that is the same in several versions is
    there once. A new version is written to the memory of the oldest one.
    """

    def __init__(
        self,
        capacity: int = 2,
        num_threads: int | None = None,
        shares: bool = True,
        writer: SliceWriter | None = None,
        directory: Path | None = None,
        senders: GroupSenders | None = None,
        cuda: CudaRuntime | None = None,
    ) -> None:
        """``capacity``: versions in the window, one less during a publication. At least 2. See ``WeightStore`` for the rest.

        ``writer``: that of rank 0, if several ranks write the tensors, see ``publish_slices``. If they are on several machines,
        none has all of the memory, so it is not shared. ``senders``: those of rank 0, if the ranks also send to receivers.
        ``cuda``: the runtime of the trainer's GPU, if processes may read its memory.
        """
        if capacity < 2:
            raise InvalidRequest(f"capacity {capacity}: expected at least 2")
        shares = shares and not (writer is not None and writer.is_spread)
        super().__init__("this weight source", capacity, num_threads, shares, directory)
        self._slice_writer, self._senders = writer, senders
        self._reader = SliceReader() if writer is None else writer.reader
        if writer is not None:
            self._allocator = writer.allocator()
        self._device_copy = DeviceCopy(cuda) if cuda is not None and self._machine else None
        self.last: PublishedWeights | None = None
        """The last publication; None before the first."""
        # The memory of the tensors of each version; that of the newest one is also _memories.
        self._places: list[list[Memory]] = []
        # Memory of tensors that no version uses, by name.
        self._spares: dict[str, Memory] = {}
        # Encoded differences between two versions, by their digests.
        self._deltas: dict[frozenset[bytes], list[Chunk]] = {}
        self._encoding = threading.Lock()
        # Publications do not wait behind chunks that are encoded.
        self._encoders = ThreadPoolExecutor(num_threads or available_cores(), thread_name_prefix="weight deltas")

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, HostTensor]],
        adapter: AdapterSettings | None = None,
        run: str = "",
        ahead: bool = False,
    ) -> bytes:
        """Copy the weights of a version, by name in any order, and return their digest, 16 bytes.

        The source takes up to WINDOW_BYTES of ``tensors`` at a time, so they may be made one after the other; ``ahead``: on
        another thread, while those before are hashed. ``run``: name of the run, empty before the first update. If names, types
        or shapes differ from the version before, all earlier versions are forgotten. Publishing the newest version again with
        the same weights changes nothing. The caller must not change the weights during the call. Raises InvalidRequest for a
        tensor whose bytes do not fit its shape, OutOfMemory if there is no memory for a copy. After an error, the source has no
        versions.
        """
        windows = made_ahead(windows_of(tensors, WINDOW_BYTES // 4)) if ahead else windows_of(tensors, WINDOW_BYTES)
        return self._publish(version, lambda before: self._take(windows, before), adapter, run)

    def publish_slices(
        self, version: int, slices: Sequence[TensorSlice], adapter: AdapterSettings | None = None, run: str = ""
    ) -> bool:
        """Publish a version whose slices all ranks write. The others call ``SliceWriter.follow`` with theirs.

        Return False if the memory cannot be shared between the ranks: then nothing is published. Raises ServiceFailed instead if
        they are on several machines. See ``publish`` for the rest.
        """
        writer = self._slice_writer
        assert writer is not None
        try:
            self._publish(version, lambda before: self._take_slices(slices, writer, before), adapter, run)
        except Exception as error:
            if isinstance(error, _NotSliced) and not writer.is_spread:
                writer.end(sliced=False)
                return False
            self._allocator = writer.allocator()
            writer.end(error=error)
            raise
        writer.end()
        return True

    def copy_on_device(self, tensors: Mapping[str, Any]) -> None:
        """Also copy the newest version, torch tensors by name, to memory of the trainer's GPU, unless a process reads there."""
        copy = self._device_copy
        with self._writer:
            with self._state:
                digest = self._versions[-1].digest
                if copy is None or copy.readers or copy.digest == digest:
                    return
                copy.digest = b""
            if copy.write(self._layouts, [tensors[layout.name] for layout in self._layouts]):
                copy.digest = digest

    def _publish(
        self,
        version: int,
        take: Callable[[Mapping[str, _Tensor]], dict[str, _Tensor]],
        adapter: AdapterSettings | None,
        run: str,
    ) -> bytes:
        start = time.perf_counter()
        with self._writer:
            with self._state:
                if self._run not in ("", run):
                    self._retire(0)
                previous = self._versions[-1] if self._versions else None
                if previous is None or previous.number != version:
                    self._retire(self._capacity - 1)
                # Otherwise the weights are probably the same, and need no memory.
                digests = previous.digests if previous else ()
                before = {
                    layout.name: _Tensor(layout, memory, digest)
                    for layout, memory, digest in zip(self._layouts, self._memories, digests, strict=False)
                }
            try:
                after = take(before)
            except BaseException:
                with self._state:
                    self._retire(0)
                    self._spares = {}
                raise
            names = sorted(after)
            layouts = tuple(after[name].layout for name in names)
            memories = [memory for name in names if (memory := after[name].memory) is not None]
            published = version_of(version, layouts, [after[name].digest for name in names], adapter)
            with self._state:
                self._run = run
                if layouts != self._layouts:
                    self._retire(0)
                elif published == previous:
                    return published.digest
                self._retire(self._capacity - 1)
                used = set(memories)
                self._spares = {name: each for name, each in self._spares.items() if name in after and each not in used}
                self.last = PublishedWeights(
                    version,
                    published.digest,
                    sum(each.is_changed for each in after.values()) if self._versions else len(names),
                    sum(layout.num_bytes for layout in layouts),
                    time.perf_counter() - start,
                )
                self._layouts, self._memories = layouts, memories
                self._versions.append(published)
                self._places.append(memories)
                self._state.notify_all()
            return published.digest

    def reset(self) -> None:
        """Forget all versions, but keep the memory. Streams that have started finish."""
        with self._writer, self._state:
            self._retire(0)

    def close(self) -> None:
        """End the threads and the streams that wait for a version. Forget all weights."""
        with self._state:
            self._places, self._spares, self._deltas = [], {}, {}
        self._encoders.shutdown(wait=False, cancel_futures=True)
        senders = self._senders if self._slice_writer is None else self._slice_writer.senders
        if senders is not None:
            senders.close()
        super().close()
        if self._device_copy is not None:
            self._device_copy.close()

    @contextmanager
    def hold(self, version: int, digest: bytes) -> Iterator[tuple[WeightSet, Mapping[str, bytes]]]:
        """Yield the weights of a version of the window without a copy, and the digest of each. Valid inside the context.

        Raises FailedPrecondition for a version that is not there.
        """
        with ExitStack() as pins:
            with self._state:
                request = WeightsRequest(self._run, version, digest)
                index = self._wanted(request)
                if index is None:
                    raise self._unknown(request)
                held, layouts, memories = self._versions[index], self._layouts, self._places[index]
                pins.enter_context(self._pinned(memories))
            tensors = {
                layout.name: HostTensor(layout.dtype, layout.shape, memory.data)
                for layout, memory in zip(layouts, memories, strict=True)
            }
            yield (
                WeightSet(held.number, held.digest, tensors, held.adapter),
                dict(zip(tensors, held.digests, strict=True)),
            )

    def _retire(self, count: int) -> None:
        """Forget the oldest versions until ``count`` are left. The state's lock must be held."""
        surplus = max(0, len(self._versions) - count)
        retired = self._places[:surplus]
        del self._versions[:surplus], self._places[:surplus]
        used = {memory for places in self._places for memory in places}
        for places in retired:
            free = zip(self._layouts, places, strict=True)
            self._spares |= {layout.name: memory for layout, memory in free if memory not in used}
        if not self._versions:
            self._memories = []
        digests = {version.digest for version in self._versions}
        self._deltas = {pair: chunks for pair, chunks in self._deltas.items() if pair <= digests}

    def _messages(self, request: WeightsRequest, wanted: int, cancelled: Callable[[], bool]) -> Messages:
        memories, manifest = self._places[wanted], self._everything_manifest(self._versions[wanted])
        if self._shares(request, memories):
            copy = self._device_copy
            if copy is not None and request.opens_handles and copy.digest == manifest.digest:
                return self._share(replace(manifest, device=copy.region), memories, cancelled), [*memories, copy]
            return self._share(manifest, memories, cancelled), memories
        senders, group, writer = self._senders, request.group, self._slice_writer
        if (
            senders is not None
            and group is not None
            and group.backend == senders.settings.backend
            and (writer is None or writer.reaches(group.host))
        ):
            return self._send_slices(manifest, memories, senders, group, cancelled), memories
        if (
            request.have_version is not None
            and (have := self._find(request.have_version, request.have_digest)) is not None
        ):
            before = self._versions[have], self._places[have]
            return self._send(manifest, memories, before), [*memories, *before[1]]
        return self._send(manifest, memories, None), memories

    def _send(
        self, manifest: Manifest, memories: Sequence[Memory], before: tuple[Version, Sequence[Memory]] | None
    ) -> Iterator[Message]:
        """Yield a delta against the version ``before`` if that is smaller than everything."""
        if before is not None:
            chunks = self._difference(manifest, memories, *before)
            if (encoded := sum(len(chunk.data) for chunk in chunks)) < manifest.num_bytes:
                yield replace(manifest, base_version=before[0].number, data_bytes=encoded)
                yield from grouped(chunks)
                return
        yield manifest
        read = self._reader.read_tensors(manifest.layouts, range(len(manifest.layouts)), memories)
        yield from grouped(
            Chunk(tensor, index, Encoding.RAW, data.data)
            for tensor, first, (part,) in read
            for index, data in chunks_of(part, first)
        )

    def _send_slices(
        self,
        manifest: Manifest,
        memories: Sequence[Memory],
        senders: GroupSenders,
        group: WeightGroup,
        cancelled: Callable[[], bool],
    ) -> Iterator[Message]:
        """Let each rank send what it has written. Yield the manifest, and wait until the caller has ended the stream."""
        first, *rest = ranks = rank_slices(memories)
        own = [memories[tensor].data[begin : begin + size] for tensor, begin, size in first.rows()]
        others = []
        for each in rest:
            assert self._slice_writer is not None
            place = self._slice_writer.place
            others.append([(*place(memories[tensor], begin), size) for tensor, begin, size in each.rows()])
        if not senders.start(group, own, others):
            yield from self._send(manifest, memories, None)
            return
        yield replace(manifest, data_bytes=0, ranks=ranks)
        with self._state:
            while not cancelled() and not self._closed:
                self._state.wait()

    def _difference(
        self,
        manifest: Manifest,
        memories: Sequence[Memory],
        before: Version,
        memories_before: Sequence[Memory],
    ) -> list[Chunk]:
        """Return the encoded difference of two versions. It is encoded once."""
        pair, layouts = frozenset({manifest.digest, before.digest}), manifest.layouts
        with self._encoding:
            chunks = self._deltas.get(pair)
            if chunks is None:
                digests = zip(before.digests, manifest.digests, strict=True)
                changed = [tensor for tensor, (old, new) in enumerate(digests) if old != new]
                chunks, window = list[Chunk](), list[_ChunkPair]()
                read = self._reader.read_tensors(layouts, changed, memories_before, memories)
                for tensor, first, parts in read:
                    for (index, old), (_, new) in zip(*(chunks_of(part, first) for part in parts), strict=True):
                        window.append((tensor, layouts[tensor], index, old, new))
                    if len(window) >= ENCODED_CHUNKS:
                        chunks += self._encoded(window)
                        window = []
                chunks += self._encoded(window)
                with self._state:
                    if pair <= {version.digest for version in self._versions}:
                        self._deltas[pair] = chunks
        return chunks

    def _encoded(self, pairs: list[_ChunkPair]) -> list[Chunk]:
        encoded = self._in_parallel(_encode_chunk, pairs, self._encoders)
        return [chunk for chunk in encoded if chunk is not None]

    def _take(self, windows: Iterable[Window], before: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        """Copy the tensors that differ from those ``before``, and return all."""
        after: dict[str, _Tensor] = {}
        for window in windows:
            taken = []
            for name, tensor in window:
                layout, old = _checked_layout(name, tensor), before.get(name)
                if old is not None and old.layout != layout:
                    old = None
                after[name] = _Tensor(layout, None if old is None else self._spare(layout), before=old)
                taken.append((after[name], tensor))
            # A tensor that has never changed needs no second place. It is read twice when it changes first.
            unknown = [each for each in taken if each[0].memory is None and each[0].before is not None]
            self._hash(unknown)
            self._place([target for target, _ in taken if target.memory is None and target.is_changed])
            copied = [each for each in taken if each[0].memory is not None]
            self._hash(copied)
            for target, _ in copied:
                if target.memory is not None:
                    target.memory.slices = ()
            for target, _ in taken:
                if not target.is_changed and target.before is not None:
                    target.memory = target.before.memory
            # The tensors can be freed before the next ones are made.
            window.clear()
            del taken, unknown, copied
        return after

    def _take_slices(
        self, slices: Sequence[TensorSlice], writer: SliceWriter, before: Mapping[str, _Tensor]
    ) -> dict[str, _Tensor]:
        """Let the ranks write the tensors that differ from those ``before``, and return all. See ``_take``."""
        tensors = []
        for part in slices:
            layout, old = part.layout, before.get(part.layout.name)
            if old is not None and old.layout != layout:
                old = None
            tensors.append(_Tensor(layout, None if old is None else self._spare(layout), before=old))
        self._place([tensor for tensor in tensors if tensor.memory is None and tensor.before is None])
        targets = [
            (tensor.memory, True)
            if tensor.memory is not None
            else (tensor.before.memory, False)
            if tensor.before is not None and tensor.before.memory is not None
            else None
            for tensor in tensors
        ]
        if any(target is None or target[0].region is None for target in targets):
            raise _NotSliced("weights: rank 0 has no memory that the ranks can share")
        changed = []
        for tensor, report in zip(tensors, writer.lead(slices, targets), strict=True):
            if tensor.memory is not None:
                tensor.digest = joined_digest(tensor.layout.dtype, tensor.layout.shape, report.blocks)
            elif tensor.before is not None and tensor.before.memory is not None:
                # Compared with other slices, some may have been those of a version before it.
                if report.differs or report.slices != tensor.before.memory.slices:
                    changed.append(tensor)
                else:
                    tensor.digest = tensor.before.digest
        if changed:
            self._place(changed)
            if any(tensor.memory is None or tensor.memory.region is None for tensor in changed):
                raise _NotSliced("weights: rank 0 has no memory that the ranks can share")
            written = frozenset(changed)
            again = [
                (tensor.memory, True) if tensor in written and tensor.memory is not None else None for tensor in tensors
            ]
            for tensor, report in zip(tensors, writer.lead(slices, again), strict=True):
                if tensor in written:
                    tensor.digest = joined_digest(tensor.layout.dtype, tensor.layout.shape, report.blocks)
        for tensor in tensors:
            if not tensor.is_changed and tensor.before is not None:
                tensor.memory = tensor.before.memory
        return {tensor.layout.name: tensor for tensor in tensors}

    def _place(self, tensors: Sequence[_Tensor]) -> None:
        """Give memory to the tensors: that of the oldest version if there is another one, or new memory."""
        if not tensors:
            return
        with self._state:
            self._retire(self._capacity - 1)
            for tensor in tensors:
                tensor.memory = self._spare(tensor.layout)
        missing = [tensor for tensor in tensors if tensor.memory is None]
        if missing and self._slice_writer is not None:
            self._slice_writer.check_memory(sum(tensor.layout.num_bytes for tensor in missing))
        memories = self._allocator.allocate([tensor.layout.num_bytes for tensor in missing])
        for tensor, memory in zip(missing, memories, strict=True):
            tensor.memory = memory

    def _hash(self, tensors: Sequence[tuple[_Tensor, HostTensor]]) -> None:
        """Compute the digests of tensors, and copy those that have a place."""
        parts = [(tensor, None if target.memory is None else target.memory.data) for target, tensor in tensors]
        for (target, _), digest in zip(tensors, tensor_digests(parts, self._in_parallel), strict=True):
            target.digest = digest

    def _spare(self, layout: TensorLayout) -> Memory | None:
        """Return memory of a tensor that no version uses and nobody reads; None if there is none."""
        with self._state:
            spare = self._spares.get(layout.name)
            return spare if spare is not None and not spare.readers and len(spare.data) == layout.num_bytes else None


class _NotSliced(ServiceFailed):
    """The memory of a publication cannot be shared between the ranks."""


def _checked_layout(name: str, tensor: HostTensor) -> TensorLayout:
    layout = TensorLayout.of(name, tensor)
    if tensor.data.dtype != np.uint8 or tensor.data.shape != (layout.num_bytes,):
        raise InvalidRequest(
            f"tensor {name}: {layout.dtype} {list(layout.shape)} needs uint8 [{layout.num_bytes}], "
            f"got {tensor.data.dtype} {list(tensor.data.shape)}"
        )
    return layout


def _encode_chunk(pair: _ChunkPair) -> Chunk | None:
    """Return the encoded difference of one chunk; None if there is none."""
    tensor, layout, index, before, after = pair
    encoded = encode(before, after, ITEM_BYTES[layout.dtype])
    return None if encoded is None else Chunk(tensor, index, *encoded)
