"""Weights as bytes in host memory, without torch, and their digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weights of one policy version.

    ``digest`` identifies the bytes of all ``tensors``: 16 bytes, see ``digests.combined_digest``. ``tensors`` have the names of
    the model's Hugging Face checkpoint; tied weights appear once. With an ``adapter``, the base weights and the adapter's
    matrices are both present, and the base weights never change.
    """

    version: int
    digest: bytes
    tensors: Mapping[str, HostTensor]
    adapter: AdapterSettings | None = None


DIGEST_BYTES = 16
"""Size of a digest."""
BLOCK_BYTES = 2**19
"""Bytes that are copied and then hashed."""


def tensor_digest(tensor: HostTensor) -> bytes:
    """Return the xxh3-128 of a tensor's dtype, shape and bytes: 16 bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(tensor.data.data)
    return digest.digest()


def copy_and_digest(tensor: HostTensor, target: Bytes) -> bytes:
    """Copy the bytes of a tensor to ``target``, uint8 of the same size. Return the digest of the bytes that are there then.

    Each block is hashed while it is in the processor's cache, so this takes little longer than the copy.
    """
    digest = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    for begin in range(0, len(target), BLOCK_BYTES):
        block = target[begin : begin + BLOCK_BYTES]
        block[:] = tensor.data[begin : begin + BLOCK_BYTES]
        digest.update(block.data)
    return digest.digest()


def combined_digest(digests: Mapping[str, bytes]) -> bytes:
    """Return the digest of a set of tensors from the digest of each by name: 16 bytes. The order does not matter."""
    combined = xxhash.xxh3_128()
    for name in sorted(digests):
        combined.update(f"{len(name.encode())}:{name}".encode())
        combined.update(digests[name])
    return combined.digest()
