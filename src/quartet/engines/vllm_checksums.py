"""Comparison of weights with the checksums that a vLLM server computes from the parameters that it holds.

vLLM fuses some projections, splits them over tensor-parallel ranks and pads the vocabulary. Each checksum is the SHA-256 of one
parameter on one rank. A checksum that equals the one of the expected bytes proves that the server holds these bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quartet.weight_transfer.tensors import ITEM_BYTES, HostTensor

VOCABULARY_PADDING = 64
"""vLLM pads the rows of embeddings to a multiple of this."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_KEY = re.compile(r"dp(?P<dp>\d+):pp(?P<pp>\d+):pcp(?P<pcp>\d+):tp(?P<tp>\d+):(?P<name>.+)")
_EMPTY = hashlib.sha256(b"").hexdigest()
Matrix = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Names of the tensors that the server holds exactly, that it holds with other values, and whose values it does not show."""

    equal: frozenset[str]
    different: frozenset[str]
    unknown: frozenset[str]


def compare(tensors: Mapping[str, HostTensor], checksums: Mapping[str, str]) -> Comparison:
    """Compare tensors with the answer of ``/weight_checker``, whose keys are "dp0:pp0:pcp0:tp0:NAME"."""
    ranks: dict[str, dict[int, set[str]]] = {}
    for key, checksum in checksums.items():
        if match := _KEY.fullmatch(key):
            name = match["name"].replace(".base_layer.", ".")
            ranks.setdefault(name, {}).setdefault(int(match["tp"]), set()).add(checksum)
    size = 1 + max((rank for values in ranks.values() for rank in values), default=0)

    def check(name: str) -> tuple[Sequence[str], bool | None]:
        parts = _parts(name, tensors)
        shown = ranks[name]
        if not parts or any(_EMPTY in values for values in shown.values()):
            return parts, None
        return parts, all(
            values == {checksum}
            for rank, values in shown.items()
            for checksum in [_first_match(values, [tensors[part] for part in parts], rank, size)]
        )

    # hashlib releases the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(check, sorted(ranks)))
    equal = {part for parts, result in results if result for part in parts}
    different = {part for parts, result in results if result is False for part in parts}
    return Comparison(frozenset(equal - different), frozenset(different), frozenset(set(tensors) - equal - different))


def _parts(name: str, tensors: Mapping[str, HostTensor]) -> Sequence[str]:
    """Return the names of the checkpoint tensors in one parameter of the server; none if its layout is not known."""
    if name in tensors:
        return (name,)
    module, _, kind = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    names = tuple(f"{parent}.{part}.{kind}" for part in _FUSED.get(last, ()))
    return names if all(part in tensors for part in names) else ()


def _first_match(values: set[str], parts: Sequence[HostTensor], rank: int, size: int) -> str | None:
    """Return the checksum in ``values`` that one of the possible layouts has."""
    for layout in _layouts(parts, rank, size):
        digest = hashlib.sha256()
        for part in layout:
            digest.update(np.ascontiguousarray(part).data)
        if digest.hexdigest() in values:
            return digest.hexdigest()
    return None


def _layouts(parts: Sequence[HostTensor], rank: int, size: int) -> Iterator[list[Matrix]]:
    """Yield the bytes that one rank may hold of the fused ``parts``, as uint8 [rows, bytes] each."""
    whole = [_rows(part) for part in parts]
    yield whole
    if size > 1:
        shards = [_shard(part, 0, rank, size) for part in whole]
        if all(shard is not None for shard in shards):
            yield [shard for shard in shards if shard is not None]
        if len(parts) == 3 and shards[0] is not None:
            # Fewer key-value heads than ranks: neighbouring ranks hold the same rows.
            for copies in (count for count in range(2, size + 1) if size % count == 0):
                repeated = [_shard(part, 0, rank // copies, size // copies) for part in whole[1:]]
                if all(shard is not None for shard in repeated):
                    yield [shards[0], *(shard for shard in repeated if shard is not None)]
        if len(parts) == 1 and len(parts[0].shape) == 2:
            columns = _shard(whole[0], 1, rank, size, ITEM_BYTES[parts[0].dtype])
            if columns is not None:
                yield [columns]
    if len(parts) == 1 and len(parts[0].shape) == 2:
        rows = whole[0]
        missing = -len(rows) % VOCABULARY_PADDING
        padded = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)]) if missing else rows
        shard = _shard(padded, 0, rank, size)
        if shard is not None:
            yield [shard]


def _rows(tensor: HostTensor) -> Matrix:
    return tensor.data.reshape(tensor.shape[0] if tensor.shape else 1, -1)


def _shard(matrix: Matrix, axis: int, rank: int, size: int, item: int = 1) -> Matrix | None:
    length, rest = divmod(matrix.shape[axis] // item, size)
    if rest:
        return None
    chosen = slice(rank * length * item, (rank + 1) * length * item)
    return matrix[chosen] if axis == 0 else matrix[:, chosen]
