"""Messages between a source of weights and its receivers. See proto/quartet/v1/weights.proto for every field."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from quartet.weight_transfer.shared_memory import SharedRegion
from quartet.weight_transfer.tensors import BLOCK_BYTES, ITEM_BYTES, AdapterSettings, HostTensor, TensorType

CHUNK_BYTES = BLOCK_BYTES
"""Tensors are cut into chunks at multiples of this number of bytes, which are the blocks of their digests."""
MAX_ENCODED_BYTES = CHUNK_BYTES + 2**16
"""Maximum size of an encoded chunk."""
MAX_MESSAGE_DATA = 4 * 2**20
"""Maximum bytes of the chunks of one message."""
MESSAGE_DATA = 2**19
"""Bytes of the chunks of a message that a source sends. Messages of 4 MiB are two to three times slower: gRPC and protobuf copy
each one several times, into new memory."""
MAX_TENSORS = 2**18
"""Maximum number of tensors. The largest models have about 100,000, most of them experts."""
MAX_NAME_BYTES = 512
"""Maximum size of a tensor's name in UTF-8."""
MAX_DIMENSIONS = 8
"""Maximum dimensions of a tensor."""
MAX_TENSOR_BYTES = 2**42
"""Maximum size of a tensor."""
MAX_LINKS = 64
"""Maximum versions between the two versions of a delta."""
MAX_REGIONS = 64
"""Maximum number of regions of shared memory."""
HANDLE_BYTES = 64
"""Size of a handle of memory on a GPU."""
MAX_RANKS = 4096
"""Maximum number of ranks that hold slices of a version."""
MAX_WAIT_SECONDS = 3600.0
"""Maximum time that a source waits for a version."""


class Encoding(enum.StrEnum):
    """Encoding of a chunk. See ``ChunkEncoding`` in proto/quartet/v1/weights.proto."""

    RAW = "raw"
    XOR_PLANES = "xor planes"
    XOR_SPARSE = "xor sparse"


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Name, element type and shape of a tensor."""

    name: str
    dtype: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the tensor; 0 for an empty one."""
        return -(-self.num_bytes // CHUNK_BYTES)

    def chunk_bytes(self, index: int) -> int:
        """Return the decoded size of a chunk in bytes."""
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)

    @classmethod
    def of(cls, name: str, tensor: HostTensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return cls(name, tensor.dtype, tensor.shape)


GroupBackend = Literal["gloo", "nccl"]
"""Backends of torch's process groups."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Where the caller of GetWeights waits for the ranks: ``port`` and the ``name`` by which they know each other.

    ``host``: that of the other side. It is not sent, but taken from the connection.
    """

    backend: GroupBackend
    port: int
    name: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class RankSlices:
    """What one rank sends through a group, in this order: ``sizes`` bytes from ``begins`` on of ``tensors`` of the manifest."""

    tensors: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield tensor, begin and size of each slice."""
        return zip(self.tensors, self.begins, self.sizes, strict=True)


@dataclass(frozen=True, slots=True)
class DeviceRegion:
    """Memory of a GPU with all tensors: ``handle`` of HANDLE_BYTES by which CUDA opens it, and its size. See ``cuda_ipc``."""

    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """Arguments of one GetWeights call. ``digest`` and ``have_digest`` have 16 bytes, or none.

    ``machine``: where the caller can map memory, see ``shared_memory.machine``; empty for a caller that wants chunks. ``group``:
    where it waits for the ranks, if it can also receive through a process group. ``opens_handles``: it has a GPU, and also opens
    memory of one.
    """

    run: str
    version: int
    digest: bytes = b""
    have_version: int | None = None
    have_digest: bytes = b""
    wait_seconds: float = 0.0
    machine: str = ""
    group: WeightGroup | None = None
    opens_handles: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of the weights that follow.

    ``layouts`` and ``digests`` have one entry for each tensor, in the order of the sorted names. ``base_version`` is the version
    that the chunks are a delta against; None if they are everything. With ``regions``, no chunks follow: the caller maps them,
    and ends the stream when it has read them. ``places``: region and offset of each tensor. ``device``: they are also in this
    memory. With ``ranks``, no chunks follow either: each rank sends its slices through the group of the request, and the caller
    ends the stream when it has them.
    """

    run: str
    version: int
    digest: bytes
    layouts: tuple[TensorLayout, ...]
    digests: tuple[bytes, ...]
    adapter: AdapterSettings | None
    base_version: int | None
    num_links: int
    data_bytes: int
    regions: tuple[SharedRegion, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    ranks: tuple[RankSlices, ...] = ()
    device: DeviceRegion | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(layout.num_bytes for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class Chunk:
    """An encoded range of a tensor: bytes ``index * CHUNK_BYTES`` up to the next multiple or the end."""

    tensor: int
    index: int
    encoding: Encoding
    data: bytes | memoryview


Message = Manifest | tuple[Chunk, ...]
"""One message of a stream: the manifest first, then chunks."""


class WeightPeer(Protocol):
    """A process that serves weights."""

    @property
    def address(self) -> str:
        """Role and address of the process, for messages."""

    @property
    def host(self) -> str:
        """Host of the process."""

    def get_weights(self, request: WeightsRequest, timeout: float) -> Iterator[Message]:
        """Yield the messages of a stream. ``timeout`` is in seconds for the whole stream. Raises QuartetError."""


def grouped(chunks: Iterable[Chunk], max_bytes: int = MESSAGE_DATA) -> Iterator[tuple[Chunk, ...]]:
    """Yield the chunks in groups of at most ``max_bytes`` of data."""
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if group and size + len(chunk.data) > max_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(chunk)
        size += len(chunk.data)
    if group:
        yield tuple(group)
