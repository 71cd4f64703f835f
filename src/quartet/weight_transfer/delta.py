"""Lossless encoding of the difference between two versions of a chunk: XOR, byte planes or a list of elements, and zstd."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import InvalidRequest
from quartet.weight_transfer.messages import CHUNK_BYTES, Encoding
from quartet.weight_transfer.tensors import Bytes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
"""zstd's level. Higher levels are slower and save less than 1% on byte planes."""
SPARSE_FRACTION = 8
"""A chunk is encoded as a list if at most one of this many elements has changed. Otherwise planes are smaller."""
_GAP: np.dtype[Any] = np.dtype("<u4")
_ELEMENTS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MAX_WINDOW_LOG = CHUNK_BYTES.bit_length() - 1


def encode(old: Bytes, new: Bytes, item_bytes: int) -> tuple[Encoding, bytes] | None:
    """Return the encoded difference between two versions of a chunk, uint8 [bytes] each; None if they are equal.

    ``item_bytes`` is the size of an element: 2 or 4.
    """
    dtype = _ELEMENTS[item_bytes]
    difference = np.bitwise_xor(old.view(dtype), new.view(dtype))
    changed = difference != 0
    count = int(np.count_nonzero(changed))
    if count == 0:
        return None
    if count * SPARSE_FRACTION > len(difference):
        return Encoding.XOR_PLANES, zstd.compress(_planes(difference), LEVEL)
    indices = np.flatnonzero(changed)
    gaps = np.diff(indices, prepend=0).astype(_GAP)
    return Encoding.XOR_SPARSE, zstd.compress(_planes(gaps) + _planes(difference[indices]), LEVEL)


class Difference:
    """A decoded difference: the XOR of elements, of all or of some."""

    def __init__(self, encoding: Encoding, data: bytes, num_bytes: int, item_bytes: int) -> None:
        """Decode the difference of a chunk of ``num_bytes``. Takes memory for the chunk at most. Raises InvalidRequest."""
        dtype = _ELEMENTS[item_bytes]
        elements = num_bytes // item_bytes
        self._dtype = dtype
        self._indices: NDArray[np.int64] | None = None
        if encoding is Encoding.XOR_PLANES:
            planes = _decompress(data, num_bytes)
            if len(planes) != num_bytes:
                raise InvalidRequest(f"chunk: expected {num_bytes} decoded bytes, got {len(planes)}")
            self._values = _elements(planes, dtype)
        elif encoding is Encoding.XOR_SPARSE:
            width = _GAP.itemsize + item_bytes
            planes = _decompress(data, elements // SPARSE_FRACTION * width)
            count, rest = divmod(len(planes), width)
            if count == 0 or rest:
                raise InvalidRequest(f"chunk: expected a multiple of {width} decoded bytes, got {len(planes)}")
            gaps = _elements(planes[: count * _GAP.itemsize], _GAP)
            self._indices = np.cumsum(gaps, dtype=np.int64)
            if not gaps[1:].all() or self._indices[-1] >= elements:
                raise InvalidRequest(f"chunk: expected ascending indices below {elements}")
            self._values = _elements(planes[count * _GAP.itemsize :], dtype)
        else:
            raise InvalidRequest(f"chunk: {encoding} is not the encoding of a difference")

    def apply(self, target: Bytes) -> None:
        """Replace one version of the chunk by the other, in place. Applied twice, it changes nothing."""
        elements = target.view(self._dtype)
        if self._indices is None:
            np.bitwise_xor(elements, self._values, out=elements)
        else:
            elements[self._indices] ^= self._values


def _planes(values: NDArray[Any]) -> bytes:
    """Return byte 0 of every element, then byte 1 of every element, and so on."""
    planes = np.empty((values.dtype.itemsize, len(values)), np.uint8)
    for index, plane in enumerate(planes):
        np.right_shift(values, 8 * index, out=plane, casting="unsafe", dtype=values.dtype)
    return planes.tobytes()


def _elements(planes: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the elements of byte planes."""
    parts = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    values: NDArray[Any] = parts[0].astype(dtype)
    for index in range(1, dtype.itemsize):
        if parts[index].any():
            values |= np.left_shift(parts[index], 8 * index, dtype=dtype)
    return values


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """Return the content of one zstd frame. Takes memory for ``max_bytes`` at most. Raises InvalidRequest."""
    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    try:
        content = decompressor.decompress(data, max_length=max_bytes)
    except zstd.ZstdError as error:
        raise InvalidRequest(f"chunk: not a zstd frame, or damaged ({error})") from None
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest(f"chunk: expected one complete zstd frame of at most {max_bytes} decoded bytes")
    return content
