"""Host copy of the weights of recent policy versions, and the streams that serve them."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import structlog

from quartet.errors import Cancelled, FailedPrecondition, InvalidRequest, ServiceUnavailable
from quartet.system.machine import available_cores
from quartet.weight_transfer.cuda_ipc import DeviceCopy
from quartet.weight_transfer.delta import Difference
from quartet.weight_transfer.descriptors import DescriptorServer, SharedDirectory
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
from quartet.weight_transfer.shared_memory import Allocator, Memory, SharedRegion, machine
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, Bytes, HostTensor, WeightSet, combined_digest

log = structlog.get_logger()

Item = TypeVar("Item")
Result = TypeVar("Result")
Messages = tuple[Iterator[Message], Sequence[Memory | DeviceCopy]]
"""Messages of a stream, and the memory that they are read from."""
Position = tuple[int, int]
"""Tensor and range of a chunk."""


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version: its number, the digest of all weights, and the digest of each tensor in the order of the layouts."""

    number: int
    digest: bytes
    digests: tuple[bytes, ...]
    adapter: AdapterSettings | None


class WeightStore(ABC):
    """Weights of a window of versions. Thread-safe.

    Every version of the window can be served as everything or as a delta against any other one, the newest also as shared
    memory. A stream that has started sends its version to the end, even if newer versions arrive.
    """

    def __init__(
        self, name: str, capacity: int, num_threads: int | None, shares: bool = True, directory: Path | None = None
    ) -> None:
        """``name`` is for messages, ``capacity`` the number of versions in the window. ``num_threads`` defaults to the cores.

        ``shares``: let processes on this machine read the memory. ``directory``: a directory that all of them see, if they are
        in different containers.
        """
        if not 1 <= capacity <= MAX_LINKS + 1:
            raise InvalidRequest(f"capacity {capacity}: expected 1 to {MAX_LINKS + 1}")
        self._name = name
        self._capacity = capacity
        self._directory: SharedDirectory | None = None
        self._socket: DescriptorServer | None = None
        self._machine = machine() if shares else ""
        self._state = threading.Condition()
        # One writer at a time. It holds the state's lock only while it starts and ends.
        self._writer = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads or available_cores(), thread_name_prefix="weights")
        self._run = ""
        self._allocator = Allocator(bool(self._machine))
        self._layouts: tuple[TensorLayout, ...] = ()
        self._memories: list[Memory] = []
        # Oldest first.
        self._versions: list[Version] = []
        self._failures = 0
        self._ending = self._closed = False
        # Memory whose readers may still read, although this process has ended their streams.
        self._lent: set[Memory | DeviceCopy] = set()
        if self._machine and directory is not None:
            self._share_through(directory)

    def _share_through(self, path: Path) -> None:
        """Give the descriptors of the memory to processes that see the directory."""
        try:
            directory = SharedDirectory(path)
            self._socket = DescriptorServer(directory, lambda: self._allocator.regions)
        except (OSError, RuntimeError) as error:
            log.warning(
                "weights are not shared between containers",
                directory=str(path),
                reason=str(error),
                remedy=f"mount one directory there in all of them, which user {os.geteuid()} may write to",
            )
        else:
            self._directory, self._machine = directory, machine(directory)

    @property
    def machine(self) -> str:
        """Machine whose processes can read the memory, see ``shared_memory.machine``; empty if none can."""
        return self._machine

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
            return next((each.digest for each in reversed(self._versions) if each.number == version), None)

    def tensor_digests(self) -> dict[str, bytes]:
        """Return the digest of each tensor of the newest version by name, 16 bytes each; empty without weights."""
        with self._state:
            digests = self._versions[-1].digests if self._versions else ()
            return {layout.name: digest for layout, digest in zip(self._layouts, digests, strict=False)}

    def weight_set(self) -> WeightSet | None:
        """Return the newest weights without a copy; None without weights. They are valid until the next version arrives."""
        with self._state:
            if not self._versions:
                return None
            newest = self._versions[-1]
            tensors = {
                layout.name: HostTensor(layout.dtype, layout.shape, memory.data)
                for layout, memory in zip(self._layouts, self._memories, strict=True)
            }
            return WeightSet(newest.number, newest.digest, tensors, newest.adapter)

    def reset(self) -> None:
        """Forget all versions, but keep the memory. Streams that have started finish."""
        with self._writer, self._state:
            self._versions = []

    def wake(self) -> None:
        """Let waiting streams check whether their caller is gone."""
        with self._state:
            self._state.notify_all()

    def end_streams(self) -> None:
        """End the streams that wait for a version or lend memory. The memory that they have lent stays as it is."""
        with self._state:
            self._ending = True
            self._state.notify_all()

    def close(self) -> None:
        """End the threads and the streams that wait for a version. Forget all weights."""
        self.end_streams()
        with self._state:
            self._closed = True
            self._versions, self._memories, self._layouts = [], [], ()
            self._allocator = Allocator(bool(self._machine))
            self._state.notify_all()
        if self._socket is not None:
            self._socket.close()
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
        with ExitStack() as pins:
            with self._state:
                failures = self._failures
                while (wanted := self._wanted(request)) is None:
                    self._wait(request, deadline, cancelled, failures)
                messages, memories = self._messages(request, wanted, cancelled)
                pins.enter_context(self._pinned(memories))
            for message in messages:
                if cancelled():
                    raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
                yield message

    @abstractmethod
    def _messages(self, request: WeightsRequest, wanted: int, cancelled: Callable[[], bool]) -> Messages:
        """Return the messages of a stream; ``wanted`` is the index of the version. The state's lock is held."""

    def _shares(self, request: WeightsRequest, memories: Sequence[Memory]) -> bool:
        """Return whether the caller can map the memory."""
        return (
            bool(request.machine)
            and request.machine == self._machine
            and all(memory.region is not None for memory in memories)
        )

    def _share(
        self, manifest: Manifest, memories: Sequence[Memory], cancelled: Callable[[], bool]
    ) -> Iterator[Message]:
        """Yield the manifest of shared memory, and wait until the caller has ended the stream or is gone."""
        regions = list(dict.fromkeys(memory.region for memory in memories if memory.region is not None))
        indices = {region: index for index, region in enumerate(regions)}
        places = tuple((indices[memory.region], memory.offset) for memory in memories if memory.region is not None)
        name = "" if self._socket is None else self._socket.name
        shared = tuple(SharedRegion(os.getpid(), region.fd, len(region.data), name) for region in regions)
        yield replace(manifest, data_bytes=0, regions=shared, places=places)
        with self._state:
            while not cancelled() and not self._ending:
                self._state.wait()

    @contextmanager
    def _pinned(self, memories: Sequence[Memory | DeviceCopy]) -> Iterator[None]:
        """Let nobody write to the memory inside the context."""
        with self._state:
            for memory in memories:
                memory.readers += 1
        try:
            yield
        finally:
            with self._state:
                if self._ending:
                    self._lent.update(memories)
                else:
                    for memory in memories:
                        memory.readers -= 1

    def _wait(self, request: WeightsRequest, deadline: float, cancelled: Callable[[], bool], failures: int) -> None:
        remaining = deadline - time.monotonic()
        if cancelled():
            raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
        if self._ending or self._failures != failures:
            raise ServiceUnavailable(f"{self._name}: the wanted version {request.version} did not arrive here")
        if remaining <= 0:
            raise self._unknown(request)
        self._state.wait(remaining)

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

    def _everything_manifest(self, version: Version) -> Manifest:
        """Return the manifest of a version that is sent as everything."""
        size = sum(layout.num_bytes for layout in self._layouts)
        return Manifest(
            self._run, version.number, version.digest, self._layouts, version.digests, version.adapter, None, 1, size
        )

    def _in_parallel(
        self, work: Callable[[Item], Result], items: Iterable[Item], pool: ThreadPoolExecutor | None = None
    ) -> list[Result]:
        """Return the results of ``work`` in the order of the items. After an error, wait for all items that have started."""
        futures = [(pool or self._pool).submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()


@dataclass(frozen=True, slots=True)
class Link:
    """Encoded difference between two neighbouring versions."""

    chunks: Mapping[Position, Sequence[Chunk]]

    @property
    def depth(self) -> int:
        """Maximum number of chunks for the same range."""
        return max(map(len, self.chunks.values()), default=0)


class LinkedStore(WeightStore):
    """The newest version in memory, and the differences to the versions before it."""

    def __init__(
        self, name: str, capacity: int, num_threads: int | None, shares: bool = True, directory: Path | None = None
    ) -> None:
        super().__init__(name, capacity, num_threads, shares, directory)
        # _links[i] is the difference between _versions[i] and _versions[i + 1].
        self._links: list[Link] = []
        # Memory of tensors that the newest version does not use, by name.
        self._spares: dict[str, Memory] = {}
        self._writing = False

    def reset(self) -> None:
        """Forget all versions, but keep the memory. Streams that have started finish."""
        super().reset()
        self._links = []

    def close(self) -> None:
        """End the threads and the streams that wait for a version. Forget all weights."""
        super().close()
        self._links, self._spares = [], {}

    def weight_set(self) -> WeightSet | None:
        """Return the newest weights, see ``WeightStore.weight_set``; None while others arrive."""
        return None if self._writing else super().weight_set()

    def _messages(self, request: WeightsRequest, wanted: int, cancelled: Callable[[], bool]) -> Messages:
        while True:
            newest = wanted == len(self._versions) - 1
            shares = newest and self._shares(request, self._memories)
            delta = None if shares else self._delta(request, wanted)
            if delta is not None:
                manifest, chunks = delta
                return chain([manifest], grouped(chunks)), ()
            if not self._writing:
                break
            # A delta needs no memory of tensors, so it does not wait for a writer.
            if cancelled():
                raise Cancelled(f"{self._name}: the caller of GetWeights is gone")
            self._state.wait()
            found = self._wanted(request)
            if found is None:
                raise self._unknown(request)
            wanted = found
        memories, manifest = list(self._memories), self._everything_manifest(self._versions[wanted])
        if shares:
            return self._share(manifest, memories, cancelled), memories
        chunks = self._everything(self._layouts, memories, self._links[wanted:])
        return chain([manifest], grouped(chunks)), memories

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
        manifest = self._everything_manifest(after)
        return replace(manifest, base_version=before.number, num_links=max(1, depth), data_bytes=size), chunks

    def _everything(
        self, layouts: Sequence[TensorLayout], memories: Sequence[Memory], links: Sequence[Link]
    ) -> Iterator[Chunk]:
        """Yield all chunks of a version; ``links`` lead from it to the version in the memories."""
        for tensor, (layout, memory) in enumerate(zip(layouts, memories, strict=True)):
            for index in range(layout.num_chunks):
                start = index * CHUNK_BYTES
                data = memory.data[start : start + layout.chunk_bytes(index)]
                differences = [chunk for link in links for chunk in link.chunks.get((tensor, index), ())]
                if differences:
                    data = data.copy()
                    apply_differences(data, differences, layout)
                yield Chunk(tensor, index, Encoding.RAW, data.data)

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

    def _writable(self, tensor: int, keep: bool) -> Memory:
        """Return the memory of a tensor for writing: another one if it is read, with the same content if ``keep``."""
        with self._state:
            memory, layout = self._memories[tensor], self._layouts[tensor]
            if not memory.readers:
                return memory
            other = self._spare(layout)
            if other is None:
                (other,) = self._allocator.allocate([layout.num_bytes])
            self._memories[tensor], self._spares[layout.name] = other, memory
        if keep:
            other.data[:] = memory.data
        return other

    def _spare(self, layout: TensorLayout) -> Memory | None:
        """Return the memory of a tensor that the newest version does not use; None if there is none, or it is read."""
        spare = self._spares.get(layout.name)
        return spare if spare is not None and not spare.readers and len(spare.data) == layout.num_bytes else None

    def _allocate(self, layouts: tuple[TensorLayout, ...]) -> None:
        """Forget all versions, and take memory for other layouts; that of the same size under the same name is kept."""
        with self._state:
            self._versions, self._links = [], []
            kept = {old.name: memory for old, memory in zip(self._layouts, self._memories, strict=True)}
            self._memories, self._layouts = [], ()
            found: list[Memory | None] = []
            for layout in layouts:
                memory = kept.pop(layout.name, None)
                if memory is not None and (memory.readers or len(memory.data) != layout.num_bytes):
                    memory = self._spare(layout)
                found.append(memory)
            # What does not fit is freed first.
            memory = None
            kept.clear()
            self._spares = {}
            new = iter(
                self._allocator.allocate(
                    [layout.num_bytes for layout, each in zip(layouts, found, strict=True) if each is None]
                )
            )
            self._memories = [next(new) if each is None else each for each in found]
            self._layouts = layouts

    def _append(self, version: Version, link: Link | None) -> None:
        """Add the newest version. Without a link, it is the only one."""
        with self._state:
            if link is None:
                self._versions, self._links = [version], []
            else:
                self._versions.append(version)
                self._links.append(link)
                self._drop_surplus()

    def _drop_surplus(self) -> None:
        surplus = max(0, len(self._versions) - self._capacity)
        del self._versions[:surplus], self._links[:surplus]


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
