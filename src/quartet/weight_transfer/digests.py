"""Digests of weights: xxh3-128 of each tensor, combined over the sorted names."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from quartet.weight_transfer.tensors import HostTensor

DIGEST_BYTES = 16
"""Size of a digest."""


def tensor_digest(tensor: HostTensor) -> bytes:
    """Return the xxh3-128 of a tensor's dtype, shape and bytes: 16 bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(tensor.data.data)
    return digest.digest()


def combined_digest(digests: Mapping[str, bytes]) -> bytes:
    """Return the digest of a set of tensors from the digest of each by name: 16 bytes. The order does not matter."""
    combined = xxhash.xxh3_128()
    for name in sorted(digests):
        combined.update(f"{len(name.encode())}:{name}".encode())
        combined.update(digests[name])
    return combined.digest()
