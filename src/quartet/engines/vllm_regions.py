"""Digests of weights whose parts lie in several regions of vLLM's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from quartet.engines.vllm_library import NAME
from quartet.errors import ServiceFailed
from quartet.weight_transfer.digests import tensor_digest
from quartet.weight_transfer.tensors import ITEM_BYTES, HostTensor


def combined_regions(name: str, tensor: HostTensor, entries: Sequence[Any]) -> bytes:
    """Return the tensor's digest if all regions hold its content; otherwise another one. Raises ServiceFailed."""
    if not entries:
        raise ServiceFailed(f"{NAME}: holds no copy of the weight {name} that can be read back; use another engine")
    whole, partial, differs = [], [], False
    covered = None
    for offset, size, stride, text in entries:
        digest = bytes.fromhex(text)
        if _is_whole(tensor, offset, size, stride):
            whole.append(digest)
            continue
        if covered is None:
            covered = np.zeros(int(np.prod(tensor.shape)), bool)
        _region(covered, offset, size, stride)[...] = True
        expected = xxhash.xxh3_128_digest(np.ascontiguousarray(_region(_elements(tensor), offset, size, stride)).data)
        differs |= digest != expected
        partial.append(digest)
    if partial and not whole and covered is not None and not covered.all():
        raise ServiceFailed(f"{NAME}: only a part of the weight {name} can be read back; use another engine")
    if differs:
        return xxhash.xxh3_128_digest(b"".join(partial))
    return agreed_digest([*whole, *([tensor_digest(tensor)] if partial else [])])


def agreed_digest(digests: Sequence[bytes]) -> bytes:
    """Return the digest that all copies have. If they differ, return one that no copy has."""
    return digests[0] if len(set(digests)) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def _is_whole(tensor: HostTensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> bool:
    row_major = _row_major(size)
    return (
        offset == 0
        and tuple(size) == tensor.shape
        and all(n == 1 or s == r for n, s, r in zip(size, stride, row_major, strict=True))
    )


def _row_major(size: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]


def _elements(tensor: HostTensor) -> NDArray[Any]:
    return tensor.data.reshape(-1).view(np.uint32 if ITEM_BYTES[tensor.dtype] == 4 else np.uint16)


def _region(elements: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int]) -> NDArray[Any]:
    """Return a view of a region of a tensor's elements. Offset and strides are in elements. Raises ServiceFailed."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if offset < 0 or min(stride, default=0) < 0 or last >= elements.size:
        raise ServiceFailed(f"{NAME}: reported a region outside its weight")
    item = elements.itemsize
    return np.lib.stride_tricks.as_strided(elements[offset:], tuple(size), tuple(s * item for s in stride))
