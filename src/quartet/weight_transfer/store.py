"""Host copy of the weights of recent policy versions, and the streams that serve them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from quartet.errors import Cancelled, FailedPrecondition, InvalidRequest, ServiceUnavailable
from quartet.system.machine import available_cores
from quartet.weight_transfer.delta import Bytes, Difference
from quartet.weight_transfer.messages import (
    CHUNK_BYTES,
    MAX_LINKS,
    Chunk,
    Encoding,
    Manifest,
    Message,
    TensorLayout,
    WeightsRequest,
    grouped,
)
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor, WeightSet, combined_digest

Item = TypeVar("Item")
Result = TypeVar("Result")
Position = tuple[int, int]
"""Tensor and range of a chunk."""


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version: its number, the digest of all weights, and the digest of each tensor in the order of the layouts."""

    number: int
    digest: bytes
    digests: tuple[bytes, ...]
    adapter: AdapterSettings | None


@dataclass(frozen=True, slots=True)
class Link:
    """Encoded difference between two neighbouring versions."""

    chunks: Mapping[Position, Sequence[Chunk]]

    @property
    def num_bytes(self) -> int:
        """Size of the encoded chunks."""
        return sum(len(chunk.data) for group in self.chunks.values() for chunk in group)

    @property
    def depth(self) -> int:
        """Maximum number of chunks for the same range."""
        return max(map(len, self.chunks.values()), default=0)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one tensor. While streams read it, it is replaced instead of written."""

    data: Bytes
    readers: int = field(default=0)


class WeightStore:
    """Weights of the newest version, and the differences to the versions before it. Thread-safe.

    Every version of the window can be served as everything or as a delta against any other one. A stream that has started sends
    its version to the end, even if newer versions arrive.
    """

    def __init__(self, name: str, capacity: int, num_threads: int | None) -> None:
        """``name`` is for messages, ``capacity`` the number of versions in the window. ``num_threads`` defaults to the cores."""
        if not 1 <= capacity <= MAX_LINKS + 1:
            raise InvalidRequest(f"capacity {capacity}: expected 1 to {MAX_LINKS + 1}")
        self._name = name
        self._capacity = capacity
        self._state = threading.Condition()
        # One writer at a time. It holds the state's lock only while it starts and ends.
        self._writer = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads or available_cores(), thread_name_prefix="weights")
        self._run = ""
        self._layouts: tuple[TensorLayout, ...] = ()
        self._buffers: list[Buffer] = []
        # Oldest first; _links[i] is the difference between _versions[i] and _versions[i + 1].
        self._versions: list[Version] = []
        self._links: list[Link] = []
        self._writing = False
        self._failures = 0
        self._closed = False

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can be served, oldest first."""
        with self._state:
            return tuple(version.number for version in self._versions)

    def published(self) -> dict[int, bytes]:
        """Return the digest of every version that can be served."""
        with self._state:
            return {version.number: version.digest for version in self._versions}

    @property
    def run(self) -> str:
        """Run of the versions; empty before its first update."""
        return self._run

    def digest_of(self, version: int) -> bytes | None:
        """Return the digest of a version, 16 bytes; None for a version that cannot be served."""
        with self._state:
            index = self._find(version)
            return None if index is None else self._versions[index].digest

    def tensor_digests(self) -> dict[str, bytes]:
        """Return the digest of each tensor of the newest version by name, 16 bytes each; empty without weights."""
        with self._state:
            digests = self._versions[-1].digests if self._versions else ()
            return {layout.name: digest for layout, digest in zip(self._layouts, digests, strict=False)}

    def weight_set(self) -> WeightSet | None:
        """Return the newest weights without a copy; None without weights. They are valid until the next version arrives."""
        with self._state:
            if not self._versions or self._writing:
                return None
            newest = self._versions[-1]
            tensors = {
                layout.name: HostTensor(layout.dtype, layout.shape, buffer.data)
                for layout, buffer in zip(self._layouts, self._buffers, strict=True)
            }
            return WeightSet(newest.number, newest.digest, tensors, newest.adapter)

    @contextmanager
    def hold(self, version: int, digest: bytes) -> Iterator[tuple[WeightSet, Mapping[str, bytes]]]:
        """Yield the weights of a version of the window without a copy, and the digest of each. Valid inside the context.

        Of an older version, each access to a tensor computes it. Raises FailedPrecondition for a version that is not there.
        """
        with self._state:
            while self._writing:
                self._state.wait()
            request = WeightsRequest(self._run, version, digest)
            index = self._wanted(request)
            if index is None:
                raise self._unknown(request)
            held, buffers = self._versions[index], list(self._buffers)
            tensors = _VersionTensors(self._layouts, buffers, self._links[index:])
            for buffer in buffers:
                buffer.readers += 1
        try:
            digests = {layout.name: each for layout, each in zip(tensors.layouts, held.digests, strict=True)}
            yield WeightSet(held.number, held.digest, tensors, held.adapter), digests
        finally:
            with self._state:
                for buffer in buffers:
                    buffer.readers -= 1

    def reset(self) -> None:
        """Forget all versions, but keep the memory. Streams that have started finish."""
        with self._writer, self._state:
            self._versions, self._links = [], []

    def wake(self) -> None:
        """Let waiting streams check whether their caller is gone."""
        with self._state:
            self._state.notify_all()

    def close(self) -> None:
        """End the threads and the streams that wait for a version. Forget all weights."""
        with self._state:
            self._closed = True
            self._versions, self._links, self._buffers, self._layouts = [], [], [], ()
            self._state.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def stream(
        self, request: WeightsRequest, cancelled: Callable[[], bool] = lambda: False
    ) -> Generator[Message, None, None]:
        """Yield the manifest, then the chunks of the wanted version.

        They are a delta if the caller's version is in the window and the delta is smaller than everything. Raises
        FailedPrecondition for a version that is not in the window, after ``request.wait_seconds``; Cancelled if the caller is
        gone.
        """
        deadline = time.monotonic() + request.wait_seconds
        with self._state:
            failures = self._failures
            while (wanted := self._wanted(request)) is None:
                self._wait(request, deadline, cancelled, failures)
            delta = self._delta(request, wanted)
            while delta is None and self._writing:
                # A delta needs no buffers, so it does not wait.
                self._wait_for_writer(cancelled)
                wanted = self._wanted(request)
                if wanted is None:
                    raise self._unknown(request)
            if delta is not None:
                manifest, chunks = delta
            else:
                manifest = self._manifest(
                    self._versions[wanted], None, 1, sum(each.num_bytes for each in self._layouts)
                )
                buffers = list(self._buffers)
                links = self._links[wanted:]
                for buffer in buffers:
                    buffer.readers += 1
                chunks = self._everything(manifest.layouts, buffers, links)
        try:
            yield manifest
            for group in grouped(chunks):
                if cancelled():
                    raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
                yield group
        finally:
            if delta is None:
                with self._state:
                    for buffer in buffers:
                        buffer.readers -= 1

    def _wait(self, request: WeightsRequest, deadline: float, cancelled: Callable[[], bool], failures: int) -> None:
        remaining = deadline - time.monotonic()
        if cancelled():
            raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
        if self._closed or self._failures != failures:
            raise ServiceUnavailable(f"{self._name}: the wanted version {request.version} did not arrive here")
        if remaining <= 0:
            raise self._unknown(request)
        self._state.wait(remaining)

    def _wait_for_writer(self, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
        self._state.wait()

    def _unknown(self, request: WeightsRequest) -> FailedPrecondition:
        held = ", ".join(f"{version.number} ({version.digest.hex()})" for version in self._versions[-4:]) or "none"
        run = f" of run {self._run!r}" if self._run else ""
        wanted = f"{request.version} ({request.digest.hex()})" if request.digest else f"{request.version}"
        return FailedPrecondition(
            f"weights: {self._name} has no version {wanted} of run {request.run!r}; its newest versions{run}: {held}"
        )

    def _wanted(self, request: WeightsRequest) -> int | None:
        return self._find(request.version, request.digest) if self._run in ("", request.run) else None

    def _find(self, version: int, digest: bytes = b"") -> int | None:
        """Return the index of the newest version with this number and, if given, this digest."""
        for index in range(len(self._versions) - 1, -1, -1):
            each = self._versions[index]
            if each.number == version and digest in (b"", each.digest):
                return index
        return None

    def _manifest(self, version: Version, base: int | None, num_links: int, data_bytes: int) -> Manifest:
        return Manifest(
            self._run,
            version.number,
            version.digest,
            self._layouts,
            version.digests,
            version.adapter,
            base,
            num_links,
            data_bytes,
        )

    def _delta(self, request: WeightsRequest, wanted: int) -> tuple[Manifest, Iterable[Chunk]] | None:
        """Return the delta against the caller's version; None if that is not in the window, or everything is smaller."""
        if request.have_version is None or not request.have_digest:
            return None
        have = self._find(request.have_version, request.have_digest)
        if have is None:
            return None
        first, last = min(have, wanted), max(have, wanted)
        links = self._links[first:last]
        depth = sum(link.depth for link in links)
        if depth > MAX_LINKS:
            return None
        before, after = self._versions[have], self._versions[wanted]
        chunks = [
            chunk
            for link in links
            for (tensor, _), group in link.chunks.items()
            if before.digests[tensor] != after.digests[tensor]
            for chunk in group
        ]
        size = sum(len(chunk.data) for chunk in chunks)
        if size >= sum(layout.num_bytes for layout in self._layouts) > 0:
            return None
        return self._manifest(after, before.number, max(1, depth), size), chunks

    def _everything(
        self, layouts: Sequence[TensorLayout], buffers: Sequence[Buffer], links: Sequence[Link]
    ) -> Iterator[Chunk]:
        """Yield all chunks of a version; ``links`` lead from it to the version in the buffers."""
        for tensor, (layout, buffer) in enumerate(zip(layouts, buffers, strict=True)):
            for index in range(layout.num_chunks):
                start = index * CHUNK_BYTES
                data = buffer.data[start : start + layout.chunk_bytes(index)]
                differences = [chunk for link in links for chunk in link.chunks.get((tensor, index), ())]
                if differences:
                    data = data.copy()
                    apply_differences(data, differences, layout)
                yield Chunk(tensor, index, Encoding.RAW, data.data)

    def _in_parallel(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of ``work`` in the order of the items. After an error, wait for all items that have started."""
        futures = [self._pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()

    @contextmanager
    def _writes(self) -> Iterator[None]:
        """Let streams that need the buffers wait. The state's lock must not be held."""
        with self._state:
            self._writing = True
        try:
            yield
        finally:
            with self._state:
                self._writing = False
                self._state.notify_all()

    def _writable(self, tensor: int, keep: bool) -> Buffer:
        """Return the buffer of a tensor for writing: another one if a stream reads it, with the same content if ``keep``."""
        with self._state:
            buffer = self._buffers[tensor]
            if buffer.readers:
                buffer = Buffer(buffer.data.copy() if keep else np.empty_like(buffer.data))
                self._buffers[tensor] = buffer
            return buffer

    def _allocate(self, layouts: tuple[TensorLayout, ...]) -> None:
        """Forget all versions, and take buffers for other layouts; those of the same size under the same name are kept."""
        with self._state:
            self._versions, self._links = [], []
            kept = {old.name: buffer for old, buffer in zip(self._layouts, self._buffers, strict=True)}
            self._buffers, self._layouts = [], ()
            buffers = []
            for layout in layouts:
                buffer = kept.pop(layout.name, None)
                if buffer is None or buffer.readers or len(buffer.data) != layout.num_bytes:
                    # The former memory is freed first.
                    buffer = None
                    buffer = Buffer(np.empty(layout.num_bytes, np.uint8))
                buffers.append(buffer)
            self._layouts, self._buffers = layouts, buffers

    def _append(self, version: Version, link: Link | None) -> None:
        """Add the newest version. Without a link, it is the only one."""
        with self._state:
            if link is None:
                self._versions, self._links = [version], []
            else:
                self._versions.append(version)
                self._links.append(link)
                surplus = max(0, len(self._versions) - self._capacity)
                del self._versions[:surplus], self._links[:surplus]


class _VersionTensors(Mapping[str, HostTensor]):
    """The tensors of a version by name, from the buffers of the newest version and the ``links`` to it."""

    def __init__(self, layouts: Sequence[TensorLayout], buffers: Sequence[Buffer], links: Sequence[Link]) -> None:
        self.layouts, self._buffers, self._links = layouts, buffers, links
        self._indices = {layout.name: index for index, layout in enumerate(layouts)}

    def __getitem__(self, name: str) -> HostTensor:
        tensor = self._indices[name]
        layout, data = self.layouts[tensor], self._buffers[tensor].data
        links = [
            link for link in self._links if any((tensor, index) in link.chunks for index in range(layout.num_chunks))
        ]
        if links:
            data = data.copy()
            for index in range(layout.num_chunks):
                begin = index * CHUNK_BYTES
                differences = [chunk for link in links for chunk in link.chunks.get((tensor, index), ())]
                apply_differences(data[begin : begin + layout.chunk_bytes(index)], differences, layout)
        return HostTensor(layout.dtype, layout.shape, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def apply_differences(data: Bytes, chunks: Sequence[Chunk], layout: TensorLayout) -> None:
    """Combine bytes of a chunk with all differences by XOR, in place: all of them, or none if one is malformed.

    Raises InvalidRequest.
    """
    item_bytes = ITEM_BYTES[layout.dtype]
    decoded = [Difference(chunk.encoding, bytes(chunk.data), len(data), item_bytes) for chunk in chunks]
    for difference in decoded:
        difference.apply(data)


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidRequest unless the names are sorted and distinct."""
    for before, after in pairwise(names):
        if before >= after:
            raise InvalidRequest(f"tensors: expected sorted and distinct names, got {before!r} before {after!r}")


def version_of(
    number: int, layouts: Sequence[TensorLayout], digests: Sequence[bytes], adapter: AdapterSettings | None
) -> Version:
    """Return a version from the digest of each tensor."""
    names = (layout.name for layout in layouts)
    return Version(number, combined_digest(dict(zip(names, digests, strict=True))), tuple(digests), adapter)
