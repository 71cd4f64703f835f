"""Digests of tensors."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from quartet.weight_transfer import tensors as module
from quartet.weight_transfer.tensors import BLOCK_BYTES, block_digests, joined_digest, tensor_digest, tensor_digests
from tests.unit.weight_transfer.samples import tensor, weights


def test_a_digest_is_that_of_the_protocol() -> None:
    each = tensor((BLOCK_BYTES + 3, 1), 5)
    blocks = [bytes(each.data[begin : begin + 2**19]) for begin in range(0, len(each.data), 2**19)]
    text = f"BF16[{BLOCK_BYTES + 3}, 1]".encode()
    expected = xxhash.xxh3_128_digest(text + b"".join(map(xxhash.xxh3_128_digest, blocks)))
    assert len(blocks) == 3
    assert tensor_digest(each) == expected


def test_parts_at_multiples_of_a_block_give_the_digest_of_the_whole() -> None:
    each = tensor((BLOCK_BYTES * 2 + 7,), 6, "F32")
    cut = 3 * BLOCK_BYTES
    blocks = block_digests(each.data[:cut]) + block_digests(each.data[cut:])
    assert joined_digest("F32", each.shape, blocks) == tensor_digest(each)


def test_pieces_on_several_threads_give_the_same_digests_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", BLOCK_BYTES)
    tensors = [*weights().values(), tensor((5 * BLOCK_BYTES,), 7, "F16")]
    targets = [np.zeros_like(each.data) for each in tensors]
    expected = [tensor_digest(each) for each in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert tensor_digests([(each, None) for each in tensors], pool.map) == expected
        assert tensor_digests(list(zip(tensors, targets, strict=True)), pool.map) == expected
    for each, target in zip(tensors, targets, strict=True):
        assert np.array_equal(each.data, target)


def test_every_changed_byte_changes_the_digest() -> None:
    each = tensor((BLOCK_BYTES,), 8)
    digest = tensor_digest(each)
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(each.data) - 1):
        each.data[place] ^= 1
        assert tensor_digest(each) != digest
        each.data[place] ^= 1
    assert tensor_digest(each) == digest
