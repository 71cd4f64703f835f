"""Weights as bytes in host memory, without torch, and their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
TensorType = Literal["F32", "BF16", "F16"]
"""Element type of a weight tensor, by the names of the safetensors format."""
ITEM_BYTES: dict[TensorType, int] = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """One weight tensor. ``data`` uint8 [bytes]: the elements in row-major order, little-endian."""

    dtype: TensorType
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of a LoRA adapter whose matrices are among the weights, by the names of PEFT's ``adapter_model.safetensors``."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


class DeviceTensors(Protocol):
    """Weights in memory of a GPU."""

    def copy(self, name: str, target: Any) -> None:
        """Start to copy a weight into ``target``, a contiguous torch tensor on a GPU. Raises ServiceUnavailable."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weights of one policy version.

    ``digest`` identifies the bytes of all ``tensors``: 16 bytes, see ``digests.combined_digest``. ``tensors`` have the names of
    the model's Hugging Face checkpoint; tied weights appear once. With an ``adapter``, the base weights and the adapter's
    matrices are both present, and the base weights never change. ``on_device``: the same bytes in memory of a GPU, from which an
    engine on a GPU can copy.
    """

    version: int
    digest: bytes
    tensors: Mapping[str, HostTensor]
    adapter: AdapterSettings | None = None
    on_device: DeviceTensors | None = None


DIGEST_BYTES = 16
"""Size of a digest."""
DIGEST_VERSION = 2
"""Version of ``tensor_digest``: 1 hashed all bytes of a tensor in sequence, 2 hashes its blocks."""
BLOCK_BYTES = 2**19
"""Tensors are hashed in blocks at multiples of this number of bytes. A block stays in a processor's cache."""
PIECE_BYTES = 2**26
"""Maximum bytes of a tensor that one thread hashes at a time, a multiple of BLOCK_BYTES."""
MIN_PARALLEL_BYTES = 2**24
"""Bytes from which on threads hash: to start them takes longer than to hash a small model."""
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map``, or that of a pool of threads."""


def tensor_digest(tensor: HostTensor) -> bytes:
    """Return the digest of a tensor: 16 bytes.

    It is the xxh3-128 of dtype and shape, such as "BF16[896, 128]", followed by the xxh3-128 of each block. So threads, and ranks
    that hold a part of a tensor, can hash at the same time.
    """
    return tensor_digests([(tensor, None)])[0]


def tensor_digests(tensors: Sequence[tuple[HostTensor, Bytes | None]], in_parallel: Map = map) -> list[bytes]:
    """Return the digest of each tensor. With a target, uint8 of the same size: copy its bytes there, and hash them there.

    Each block is hashed while it is in the processor's cache, so this takes little longer than a copy.
    """
    pieces = [
        (tensor.data[begin : begin + PIECE_BYTES], None if target is None else target[begin : begin + PIECE_BYTES])
        for tensor, target in tensors
        for begin in range(0, len(tensor.data), PIECE_BYTES)
    ]
    if sum(tensor.data.nbytes for tensor, _ in tensors) < MIN_PARALLEL_BYTES:
        in_parallel = map
    # Small pieces fill the gaps at the end.
    order = sorted(range(len(pieces)), key=lambda index: -len(pieces[index][0]))
    blocks = dict(zip(order, in_parallel(_block_digests, [pieces[index] for index in order]), strict=True))
    digests, done = [], 0
    for tensor, _ in tensors:
        begin, done = done, done + -(-len(tensor.data) // PIECE_BYTES)
        digests.append(joined_digest(tensor.dtype, tensor.shape, b"".join(map(blocks.__getitem__, range(begin, done)))))
    return digests


def joined_digest(dtype: TensorType, shape: tuple[int, ...], blocks: bytes | bytearray) -> bytes:
    """Return the digest of a tensor from the digests of its blocks, one after the other."""
    digest = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    digest.update(blocks)
    return digest.digest()


def block_digests(data: Bytes, target: Bytes | None = None) -> bytes:
    """Return the digest of each block of ``data``, 16 bytes each. With a ``target``, see ``tensor_digests``."""
    digests = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        if target is not None:
            copy = target[begin : begin + BLOCK_BYTES]
            copy[:] = block
            block = copy
        digests.append(xxhash.xxh3_128_digest(block.data))
    return b"".join(digests)


def _block_digests(piece: tuple[Bytes, Bytes | None]) -> bytes:
    return block_digests(*piece)


def combined_digest(digests: Mapping[str, bytes]) -> bytes:
    """Return the digest of a set of tensors from the digest of each by name: 16 bytes. The order does not matter."""
    combined = xxhash.xxh3_128()
    for name in sorted(digests):
        combined.update(f"{len(name.encode())}:{name}".encode())
        combined.update(digests[name])
    return combined.digest()


Window = list[tuple[str, HostTensor]]
"""Tensors that are hashed and copied together, by name."""


def windows_of(tensors: Iterable[tuple[str, HostTensor]], window_bytes: int) -> Iterator[Window]:
    """Yield lists of tensors, each of these bytes or the tensor that goes beyond them. The caller clears each list."""
    window: Window = []
    size = 0
    for name, tensor in tensors:
        window.append((name, tensor))
        size += tensor.data.nbytes
        if size >= window_bytes:
            del tensor
            yield window
            window, size = [], 0
    if window:
        yield window
