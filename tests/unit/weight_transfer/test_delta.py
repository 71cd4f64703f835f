"""Differences between two versions of a chunk: lossless for all bits, and bounded memory for malformed data."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quartet.errors import InvalidRequest
from quartet.weight_transfer import delta
from quartet.weight_transfer.delta import Difference, encode, zstd
from quartet.weight_transfer.messages import CHUNK_BYTES, MAX_ENCODED_BYTES, Encoding


def restored(old: NDArray[np.uint8], new: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8]:
    """Return ``old`` with the encoded difference applied."""
    encoded = encode(old, new, item_bytes)
    result = old.copy()
    if encoded is not None:
        Difference(*encoded, len(old), item_bytes).apply(result)
    return result


@given(
    elements=st.integers(0, 3000),
    item_bytes=st.sampled_from([2, 4]),
    fraction=st.sampled_from([0.0, 0.001, 0.02, 0.12, 0.13, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_a_difference_restores_every_bit(elements: int, item_bytes: int, fraction: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, elements * item_bytes).astype(np.uint8)
    new = old.copy()
    new.view(f"<u{item_bytes}")[random.random(elements) < fraction] ^= 0x1235
    assert restored(old, new, item_bytes).tobytes() == new.tobytes()
    assert restored(new, old, item_bytes).tobytes() == old.tobytes()


def test_not_a_number_and_negative_zero_keep_their_bits() -> None:
    old = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 1.0, 2.0, 3.0], np.float32)
    new = np.array([0x80000000, 0, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800000, 1, 0x40400000], np.uint32)
    assert restored(old.view(np.uint8), new.view(np.uint8), 4).tobytes() == new.tobytes()


def test_equal_chunks_have_no_difference() -> None:
    data = np.arange(64, dtype=np.uint8)
    assert encode(data, data.copy(), 2) is None
    assert encode(data[:0], data[:0], 4) is None


def test_few_changes_are_a_list_and_many_are_planes() -> None:
    old = np.zeros(8000, np.uint8)
    few, many = old.copy(), old.copy()
    few.view(np.uint16)[:500] = 1
    many.view(np.uint16)[:501] = 1
    assert [(encode(old, new, 2) or [None])[0] for new in (few, many)] == [Encoding.XOR_SPARSE, Encoding.XOR_PLANES]


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_the_largest_difference_fits_a_chunk(item_bytes: int) -> None:
    old, new = np.random.default_rng(0).integers(0, 256, (2, CHUNK_BYTES)).astype(np.uint8)
    encoded = encode(old, new, item_bytes)
    assert encoded is not None
    assert len(encoded[1]) <= MAX_ENCODED_BYTES
    assert restored(old, new, item_bytes).tobytes() == new.tobytes()


def test_unaligned_bytes_are_encoded() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 4001).astype(np.uint8)
    old, new = np.zeros(4000, np.uint8), memory[1:]
    assert restored(old, new, 4).tobytes() == new.tobytes()


def frame(content: bytes) -> bytes:
    return zstd.compress(content, 1)


def sparse(gaps: list[int], values: list[int]) -> bytes:
    planes = delta._planes(np.array(gaps, "<u4")) + delta._planes(np.array(values, "<u2"))
    return frame(planes)


NUM_BYTES = 4096
MALFORMED: dict[str, tuple[Encoding, bytes, str]] = {
    "no frame": (Encoding.XOR_PLANES, b"\0" * 20, "not a zstd frame"),
    "a frame cut off": (Encoding.XOR_PLANES, frame(b"x" * NUM_BYTES)[:-1], "one complete zstd frame"),
    "two frames": (Encoding.XOR_PLANES, frame(b"x" * NUM_BYTES) * 2, "one complete zstd frame"),
    "too few bytes": (Encoding.XOR_PLANES, frame(b"x" * (NUM_BYTES - 2)), "expected 4096 decoded bytes, got 4094"),
    "a bomb": (Encoding.XOR_PLANES, frame(bytes(2**28)), "zstd"),
    "a bomb as a list": (Encoding.XOR_SPARSE, frame(bytes(2**28)), "zstd"),
    "an empty list": (Encoding.XOR_SPARSE, frame(b""), "multiple of 6"),
    "a broken list": (Encoding.XOR_SPARSE, frame(b"1234567"), "multiple of 6"),
    "an index twice": (Encoding.XOR_SPARSE, sparse([3, 0], [1, 1]), "ascending indices"),
    "an index beyond the end": (Encoding.XOR_SPARSE, sparse([3, 2045], [1, 1]), "ascending indices below 2048"),
    "indices that overflow": (Encoding.XOR_SPARSE, sparse([2**32 - 1] * 200, [1] * 200), "ascending indices"),
    "a full chunk": (Encoding.RAW, b"x" * NUM_BYTES, "not the encoding of a difference"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_data_is_refused(case: str) -> None:
    encoding, data, expected = MALFORMED[case]
    with pytest.raises(InvalidRequest, match=expected):
        Difference(encoding, data, NUM_BYTES, 2)


def test_a_bomb_takes_no_more_memory_than_a_chunk() -> None:
    bomb = frame(bytes(2**28))
    for encoding in (Encoding.XOR_PLANES, Encoding.XOR_SPARSE):
        tracemalloc.start()
        with pytest.raises(InvalidRequest):
            Difference(encoding, bomb, NUM_BYTES, 2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
