"""The host copy of the weights that a generator holds."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import structlog

from quartet.config.section import pause_after
from quartet.contract.weights import TransferWay
from quartet.errors import InvalidRequest, NoResponse, QuartetError, ServiceBusy, ServiceFailed, ServiceUnavailable
from quartet.system.machine import available_cores
from quartet.weight_transfer.cuda_ipc import CudaRuntime, OpenedCopy
from quartet.weight_transfer.link_speed import MIN_MEASURED_BYTES, LinkSpeed
from quartet.weight_transfer.manifest_checks import (
    WrongWeights,
    check_slices,
    checked_manifest,
    collect_delta,
    data_chunks,
)
from quartet.weight_transfer.mapped_regions import MappedRegions, process_of
from quartet.weight_transfer.messages import (
    CHUNK_BYTES,
    Encoding,
    Manifest,
    Message,
    WeightPeer,
    WeightsRequest,
)
from quartet.weight_transfer.process_group import GroupFailed, GroupSettings, Meeting, first_line
from quartet.weight_transfer.shared_memory import Allocator
from quartet.weight_transfer.store import Link, LinkedStore, Position, apply_differences, version_of
from quartet.weight_transfer.tensors import (
    HostTensor,
    WeightSet,
    block_digests,
    joined_digest,
    tensor_digest,
    tensor_digests,
)

log = structlog.get_logger()

MAX_GROUP_FAILURES = 3
"""Transfers through process groups that may fail in a row. Then something, such as a firewall, is in between."""
REMAP_PULLS = 16
"""Pulls after which memory of a process that could not be mapped is tried again: it may have been for lack of descriptors."""
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Seconds before busy sources are asked again. The pause doubles each time."""


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """Result of a pull.

    ``changed`` names the tensors that differ from those of ``base_digest``, the version before; all of them if it is empty.
    ``bytes_received``: data of the chunks. ``source``: role and address of the process that sent them; empty for "held", when
    the mirror had the version. After ``way`` "shared memory" or "CUDA IPC", the weights are in memory of the source, and their
    bytes are not verified: see ``verify``. They are valid until ``WeightMirror.release``.
    """

    weight_set: WeightSet
    base_digest: bytes
    changed: frozenset[str]
    bytes_received: int
    seconds: float
    source: str
    way: TransferWay
    digests: Mapping[str, bytes] = field(default_factory=dict)

    def verify(self) -> None:
        """Compute the digest of every shared tensor. Raises ServiceFailed if one is not that of the source."""
        tensors = [(self.weight_set.tensors[name], None) for name in self.digests]
        with ThreadPoolExecutor(available_cores()) as pool:
            found = tensor_digests(tensors, pool.map)
        for (name, digest), other in zip(self.digests.items(), found, strict=True):
            if other != digest:
                raise ServiceFailed(
                    f"{self.source}: shared memory: version {self.weight_set.version}: {name} has another digest than in the "
                    "manifest; a stream that ends during a load lets the source write another version there"
                )


class WeightMirror(LinkedStore):
    """Host copy of the weights of a generator. It serves them to other generators.

    A source on the same machine shares its memory: then there is no copy, and the mirror holds nothing.

    A source sends everything or a delta, whichever took less time last. A delta is applied after all of it has arrived. If the
    result does not have the expected digests, it is undone: the mirror then holds the version before. A full set overwrites the
    memory as it arrives: if it fails, the mirror is empty, and the next pull takes everything.
    """

    def __init__(
        self,
        name: str = "this generator",
        capacity: int = 2,
        num_threads: int | None = None,
        max_bytes: int | None = None,
        shares: bool = True,
        directory: Path | None = None,
        group: GroupSettings | None = None,
        cuda: CudaRuntime | None = None,
    ) -> None:
        """``max_bytes``: maximum size of the weights. Defaults to this machine's memory. ``group``: how to receive through
        groups, if it can. ``cuda``: the runtime of the engine's GPU, if the engine copies from memory of a GPU. See
        ``WeightStore`` for the rest.
        """
        super().__init__(name, capacity, num_threads, shares, directory)
        self._max_bytes = max_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._group, self._cuda = group, cuda
        # Transfers from each source that have failed since the last one that has not.
        self._group_failures = Counter[str]()
        self.speeds: defaultdict[str, LinkSpeed] = defaultdict(LinkSpeed)
        """What transfers over gRPC have taken, by the address of the source."""
        self._lease: Iterator[Message] | None = None
        self._opened: OpenedCopy | None = None
        # Processes whose memory on a GPU could not be opened.
        self._not_opened: set[tuple[str, str]] = set()
        self._mapped = MappedRegions(self._directory)
        # Address and process of each source whose weights are sent, without the process on other machines; pulls until a retry.
        self._sent: set[tuple[str, str]] = set()
        self._skips = Counter[tuple[str, str]]()
        # The version before, and the digests of its tensors.
        self._seen: tuple[bytes, Mapping[str, bytes]] = b"", {}

    def pull(
        self,
        sources: Sequence[WeightPeer],
        run: str,
        version: int,
        digest: bytes,
        timeout: float,
        wait_seconds: float = 0.0,
    ) -> PulledWeights:
        """Bring the mirror to a version, from the first of the ``sources`` that can send it.

        ``digest``: expected digest, 16 bytes. ``timeout``: seconds for all sources together. ``wait_seconds``: time for which a
        source waits for the version. A delta with a wrong result is followed by everything from the same source; then from the
        next one. Busy sources are asked again. Raises the error of the last source, with the text of all; ServiceFailed names a
        source with malformed or wrong weights; NoResponse after ``timeout``.
        """
        start = time.perf_counter()
        deadline = time.monotonic() + timeout
        with self._writer:
            self.release()
            if self._versions and self._run == run and self._find(version, digest) == len(self._versions) - 1:
                return self._pulled(digest, frozenset(), 0, start, "", "held")
            errors: list[QuartetError] = []
            delta, remaining = True, list(sources)
            for rounds in count(1):
                busy = []
                for source in remaining:
                    shares = True
                    grouped = self._group is not None and self._group_failures[source.address] < MAX_GROUP_FAILURES
                    # By shared memory, through a process group, as a delta, as everything.
                    for _ in range(4):
                        speed = self.speeds[source.address]
                        held = self._versions[-1] if self._versions and delta and self._run == run else None
                        # Of weights with an adapter, only the adapter changes: a delta has a small part of everything.
                        is_small = held is not None and held.adapter is not None
                        have = held if is_small or speed.prefers_delta() else None
                        request = WeightsRequest(
                            run,
                            version,
                            digest,
                            None if have is None else have.number,
                            b"" if have is None else have.digest,
                            wait_seconds,
                            self._machine if shares else "",
                            opens_handles=shares and self._cuda is not None,
                        )
                        began = time.perf_counter()
                        try:
                            pulled = self._pull(source, request, deadline, start, grouped and not is_small)
                            # A source that waits for the version itself says nothing about the link.
                            if (
                                pulled.way in ("full", "delta")
                                and not wait_seconds
                                and self._size >= MIN_MEASURED_BYTES
                            ):
                                speed.record(have is not None, time.perf_counter() - began)
                            return pulled
                        except ServiceBusy as error:
                            errors.append(error)
                            busy.append(source)
                            break
                        except _NotShared:
                            shares = False
                        except GroupFailed as error:
                            grouped = False
                            self._group_failures[source.address] += 1
                            reason = f"{source.address}: process group: {error}"
                            errors.append(ServiceUnavailable(reason))
                            last = self._group_failures[source.address] == MAX_GROUP_FAILURES
                            log.warning(
                                "weights are sent by gRPC, the process group has failed",
                                reason=reason,
                                **({"next": "gRPC only, until this generator is restarted"} if last else {}),
                            )
                        except WrongWeights as error:
                            errors.append(ServiceFailed(str(error)))
                            if have is None:
                                break
                            # Either side may be wrong about the version before.
                            delta = False
                        except QuartetError as error:
                            errors.append(error)
                            break
                pause, remaining = pause_after(rounds, FIRST_PAUSE, MAX_PAUSE), busy
                if not busy or time.monotonic() + pause > deadline:
                    break
                time.sleep(pause)
            self._fail()
            if not errors:
                raise InvalidRequest("sources: expected at least one")
            texts = dict.fromkeys(str(error) for error in errors)
            raise type(errors[-1])("; ".join(texts)) from errors[-1]

    @property
    def _size(self) -> int:
        return sum(layout.num_bytes for layout in self._layouts)

    def release(self) -> None:
        """Let the source write to the memory that it shares. The weights of the last pull are not used any more."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            _close(lease)

    def close(self) -> None:
        """End the threads and all streams. Forget all weights."""
        self.release()
        self._mapped.clear()
        super().close()

    def _explain(self, source: WeightPeer, process: str, reason: str) -> None:
        """Say once for each process why its weights are sent. ``process``: empty for one on another machine."""
        if self._machine and (source.address, process) not in self._sent:
            self._sent.add((source.address, process))
            log.info(
                "weights are sent, not shared",
                source=source.address,
                reason=reason,
                remedy="to share them, run both on one machine and as one user, in one namespace of processes and users or with "
                "one directory at rollout.share_directory",
            )

    def _fail(self) -> None:
        """Tell the waiting streams that the version will not arrive."""
        with self._state:
            self._failures += 1
            self._state.notify_all()

    def _pulled(
        self,
        base_digest: bytes,
        changed: frozenset[str],
        received: int,
        start: float,
        source: str,
        way: TransferWay,
    ) -> PulledWeights:
        weights = self.weight_set()
        assert weights is not None
        self._seen = weights.digest, self.tensor_digests()
        return PulledWeights(weights, base_digest, changed, received, time.perf_counter() - start, source, way)

    def _pull(
        self, source: WeightPeer, request: WeightsRequest, deadline: float, start: float, grouped: bool = False
    ) -> PulledWeights:
        """``grouped``: also offer to receive through a process group. Raises GroupFailed."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise NoResponse(f"{source.address}: GetWeights: no time left")
        if self._group is not None and grouped:
            try:
                meeting = Meeting(self._group, source.host)
            except (OSError, ImportError, QuartetError) as error:
                raise GroupFailed(first_line(error)) from None
            with closing(meeting):
                return self._receive(source, replace(request, group=meeting.group), deadline, start, meeting)
        return self._receive(source, request, deadline, start)

    def _receive(
        self,
        source: WeightPeer,
        request: WeightsRequest,
        deadline: float,
        start: float,
        meeting: Meeting | None = None,
    ) -> PulledWeights:
        stream = source.get_weights(request, deadline - time.monotonic())
        try:
            manifest = checked_manifest(next(stream, None), request, self._layouts, self._max_bytes)
            if manifest.regions:
                pulled = self._map(manifest, source, start)
                self._lease = stream
                return pulled
            if request.machine:
                self._explain(source, "", "it is on another machine, of another user, or in another container")
            base_digest = b"" if manifest.base_version is None else self._versions[-1].digest
            if manifest.ranks:
                received = self._receive_slices(manifest, meeting, request.run, deadline)
                changed = frozenset(layout.name for layout in manifest.layouts)
                way: TransferWay = "process group"
                self._group_failures[source.address] = 0
            elif manifest.base_version is None:
                received = self._receive_everything(manifest, stream, request.run)
                changed = frozenset(layout.name for layout in manifest.layouts)
                way = "full"
            else:
                changed, received = self._receive_delta(manifest, stream)
                way = "delta"
        except (WrongWeights, InvalidRequest) as error:
            raise WrongWeights(f"{source.address}: GetWeights: {error}") from None
        finally:
            if self._lease is not stream:
                _close(stream)
        return self._pulled(base_digest, changed, received, start, source.address, way)

    def _map(self, manifest: Manifest, source: WeightPeer, start: float) -> PulledWeights:
        """Map the memory that a source shares. Raises _NotShared, also for a process whose memory could not be mapped lately."""
        skips = source.address, (process := process_of(manifest.regions))
        if self._skips[skips]:
            self._skips[skips] -= 1
            raise _NotShared
        self._skips[skips] = REMAP_PULLS - 1
        try:
            memory = self._mapped.map(manifest.regions)
        except QuartetError as error:
            self._explain(source, process, str(error))
            raise _NotShared from None
        tensors = {}
        for layout, (region, offset) in zip(manifest.layouts, manifest.places, strict=True):
            data = memory[region][offset : offset + layout.num_bytes]
            if len(data) != layout.num_bytes:
                self._explain(
                    source, process, f"{layout.name}: its {layout.num_bytes} bytes go beyond the end of region {region}"
                )
                raise _NotShared
            tensors[layout.name] = HostTensor(layout.dtype, layout.shape, data)
        del self._skips[skips]
        self._opened = self._open(manifest, skips)
        digests = dict(zip(tensors, manifest.digests, strict=True))
        base, before = self._seen
        changed = frozenset(name for name, digest in digests.items() if before.get(name) != digest)
        self._seen = manifest.digest, digests
        with self._state:
            # A mirror that maps has nothing to send, so it needs no memory. Streams that have started keep theirs.
            self._versions, self._links, self._memories, self._layouts, self._spares = [], [], [], (), {}
            self._allocator = Allocator(bool(self._machine))
        self._fail()
        seconds = time.perf_counter() - start
        weights = WeightSet(manifest.version, manifest.digest, tensors, manifest.adapter, self._opened)
        way: TransferWay = "shared memory" if self._opened is None else "CUDA IPC"
        return PulledWeights(weights, base, changed, 0, seconds, source.address, way, digests)

    def _open(self, manifest: Manifest, source: tuple[str, str]) -> OpenedCopy | None:
        """Open the same weights on the GPU of a source, its address and process; None if they are not there."""
        if self._cuda is None or manifest.device is None or source in self._not_opened:
            return None
        try:
            return OpenedCopy(self._cuda, manifest.device, manifest.layouts)
        except ServiceUnavailable as error:
            self._not_opened.add(source)
            log.info("weights are read from the host, not from the GPU", source=source[0], reason=str(error))
            return None

    def _receive_everything(self, manifest: Manifest, stream: Iterator[Message], run: str) -> int:
        """Write all chunks into the buffers. Return the bytes received."""
        with self._writes():
            self._allocate(manifest.layouts)
            # The blocks of a digest are the chunks: each is hashed while it is in the processor's cache.
            blocks: list[list[bytes]] = [[] for _ in manifest.layouts]
            expected = (
                (tensor, index) for tensor, layout in enumerate(manifest.layouts) for index in range(layout.num_chunks)
            )
            received = 0
            for chunk in data_chunks(stream):
                tensor, index = next(expected, (-1, -1))
                if (chunk.tensor, chunk.index, chunk.encoding) != (tensor, index, Encoding.RAW):
                    raise WrongWeights(
                        f"expected raw chunk {index} of tensor {tensor}, got {chunk.encoding} chunk {chunk.index} of "
                        f"tensor {chunk.tensor}"
                    )
                layout = manifest.layouts[tensor]
                size = layout.chunk_bytes(index)
                if len(chunk.data) != size:
                    raise WrongWeights(f"{layout.name}: expected {size} bytes in chunk {index}, got {len(chunk.data)}")
                begin = index * CHUNK_BYTES
                target = self._memories[tensor].data[begin : begin + size]
                blocks[tensor].append(block_digests(np.frombuffer(chunk.data, np.uint8), target))
                received += size
            missing = next(expected, None)
            if missing is not None:
                raise WrongWeights(f"the stream ended before chunk {missing[1]} of tensor {missing[0]}")
            digests = [
                joined_digest(layout.dtype, layout.shape, b"".join(each))
                for layout, each in zip(manifest.layouts, blocks, strict=True)
            ]
            self._check(manifest, range(len(manifest.layouts)), digests)
            with self._state:
                self._run = run
                self._append(version_of(manifest.version, manifest.layouts, manifest.digests, manifest.adapter), None)
        return received

    def _receive_slices(self, manifest: Manifest, meeting: Meeting | None, run: str, deadline: float) -> int:
        """Receive the slices of all ranks into the buffers. Return the bytes received. Raises GroupFailed."""
        if meeting is None:
            raise WrongWeights("expected no slices of ranks without a group")
        check_slices(manifest)
        with self._writes():
            self._allocate(manifest.layouts)
            digests: dict[int, Future[bytes]] = {}

            def hash_tensor(tensor: int) -> None:
                digests[tensor] = self._pool.submit(self._digest, tensor)

            targets = [memory.data for memory in self._memories]
            received = meeting.receive(manifest.ranks, targets, hash_tensor, deadline)
            for tensor, layout in enumerate(manifest.layouts):
                if not layout.num_bytes:
                    hash_tensor(tensor)
            order = range(len(manifest.layouts))
            try:
                self._check(manifest, order, [digests[tensor].result() for tensor in order])
            except WrongWeights as error:
                raise GroupFailed(str(error)) from None
            with self._state:
                self._run = run
                self._append(version_of(manifest.version, manifest.layouts, manifest.digests, manifest.adapter), None)
        return received

    def _receive_delta(self, manifest: Manifest, stream: Iterator[Message]) -> tuple[frozenset[str], int]:
        """Collect all chunks, then apply them. Return the names of the changed tensors and the bytes received."""
        previous = self._versions[-1].digests
        changed = [index for index, digest in enumerate(manifest.digests) if digest != previous[index]]
        chunks, received = collect_delta(manifest, stream, frozenset(changed))
        with self._writes():
            data = {tensor: self._writable(tensor, keep=True).data for tensor in changed}
            applied: list[Position] = []

            def apply(position: Position) -> None:
                tensor, index = position
                begin, layout = index * CHUNK_BYTES, manifest.layouts[tensor]
                apply_differences(data[tensor][begin : begin + layout.chunk_bytes(index)], chunks[position], layout)
                applied.append(position)

            try:
                self._in_parallel(apply, chunks)
                self._check(manifest, changed, self._in_parallel(self._digest, changed))
            except BaseException:
                # XOR is its own inverse.
                undo, applied = applied, []
                self._in_parallel(apply, undo)
                raise
            self._append(
                version_of(manifest.version, manifest.layouts, manifest.digests, manifest.adapter), Link(chunks)
            )
        return frozenset(manifest.layouts[index].name for index in changed), received

    def _digest(self, tensor: int) -> bytes:
        layout = self._layouts[tensor]
        return tensor_digest(HostTensor(layout.dtype, layout.shape, self._memories[tensor].data))

    @staticmethod
    def _check(manifest: Manifest, tensors: Sequence[int], digests: Sequence[bytes]) -> None:
        wrong = [
            manifest.layouts[tensor].name
            for tensor, digest in zip(tensors, digests, strict=True)
            if digest != manifest.digests[tensor]
        ]
        if wrong:
            raise WrongWeights(
                f"version {manifest.version}: {len(wrong)} tensors have another digest than in the manifest, the first is "
                f"{wrong[0]}"
            )


class _NotShared(Exception):
    """The memory of a source cannot be mapped."""


def _close(stream: Iterator[Message]) -> None:
    close = getattr(stream, "close", None)
    if close is not None:
        close()
