"""Token batches as messages, and the arrays of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.conformance.outcome import expect, name_of
from quartet.conformance.target import TokenPair
from quartet.v1 import tensor_pb2, trajectory_pb2

PADDING_FIELD = 536870911
"""Number of a field that no message has: the largest one. Receivers ignore unknown fields."""


def tensor(values: NDArray[Any] | Sequence[int]) -> tensor_pb2.Tensor:
    """Return int32 or float32 values as a message."""
    array = np.asarray(values)
    if array.dtype.kind == "i":
        array = array.astype("<i4")
        return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=array.shape, data=array.tobytes())
    array = array.astype("<f4")
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())


def batch_of(sequences: Sequence[TokenPair]) -> trajectory_pb2.TokenBatch:
    """Return ragged sequences as a message."""
    ids = [part for prompt, response in sequences for part in (prompt, response)]
    return trajectory_pb2.TokenBatch(
        token_ids=tensor(np.concatenate(ids) if ids else np.zeros(0, np.int32)),
        prompt_lengths=tensor(np.array([len(prompt) for prompt, _ in sequences], np.int32)),
        response_lengths=tensor(np.array([len(response) for _, response in sequences], np.int32)),
    )


def floats(message: tensor_pb2.Tensor, name: str, length: int, finite: bool = True) -> NDArray[np.float32]:
    """Return a float32 tensor of one dimension with ``length`` elements, which are all ``finite``. Raises Violation."""
    expect(
        message.dtype == tensor_pb2.DATA_TYPE_FLOAT32,
        f"{name}: dtype is {name_of(tensor_pb2.DataType, message.dtype)}; expected DATA_TYPE_FLOAT32",
    )
    expect(list(message.shape) == [length], f"{name}: shape is {list(message.shape)}; expected [{length}]")
    expect(
        len(message.data) == 4 * length,
        f"{name}: data has {len(message.data)} bytes; expected {4 * length}, 4 for each of {length} elements",
    )
    values: NDArray[np.float32] = np.frombuffer(message.data, "<f4")
    expect(not finite or np.isfinite(values).all(), f"{name}: contains NaN or infinity; expected finite numbers")
    return values


def token_ids(message: tensor_pb2.Tensor, name: str, vocabulary_size: int) -> NDArray[np.int32]:
    """Return an int32 tensor of one dimension with ids of the vocabulary, which may be empty. Raises Violation."""
    expect(
        message.dtype == tensor_pb2.DATA_TYPE_INT32,
        f"{name}: dtype is {name_of(tensor_pb2.DataType, message.dtype)}; expected DATA_TYPE_INT32",
    )
    expect(len(message.shape) == 1, f"{name}: shape is {list(message.shape)}; expected one dimension")
    expect(
        len(message.data) == 4 * message.shape[0],
        f"{name}: data has {len(message.data)} bytes; expected {4 * message.shape[0]}, 4 for each of {message.shape[0]} elements",
    )
    ids: NDArray[np.int32] = np.frombuffer(message.data, "<i4")
    expect(
        not len(ids) or (ids.min() >= 0 and ids.max() < vocabulary_size),
        f"{name}: has ids from {ids.min(initial=0)} to {ids.max(initial=0)}; expected ids in 0..{vocabulary_size - 1}",
    )
    return ids


def padded(request: Any, size: int) -> Any:
    """Return a request of the same meaning that is ``size`` bytes longer, in an unknown field."""
    key = PADDING_FIELD << 3 | 2
    copy = type(request)()
    copy.MergeFromString(request.SerializeToString() + _varint(key) + _varint(size) + bytes(size))
    return copy


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
