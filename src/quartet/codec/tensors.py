"""NumPy arrays as Tensor messages: element type, shape, and little-endian bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import ExpertArray, FloatArray, IntArray
from quartet.errors import InvalidRequest
from quartet.v1 import tensor_pb2

FLOAT32, INT32, BOOL = np.dtype("<f4"), np.dtype("<i4"), np.dtype(np.bool_)
EXPERTS = np.dtype("u1"), np.dtype("<u2")
"""Element types of the indices of experts."""
DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: FLOAT32,
    tensor_pb2.DATA_TYPE_INT32: INT32,
    tensor_pb2.DATA_TYPE_BOOL: BOOL,
    tensor_pb2.DATA_TYPE_UINT8: EXPERTS[0],
    tensor_pb2.DATA_TYPE_UINT16: EXPERTS[1],
}
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def dtype_to_proto(dtype: np.dtype[Any]) -> int:
    """Return the number of an element type. Raises InvalidRequest for any other type."""
    number = _NUMBERS.get(dtype.newbyteorder("<"))
    if number is None:
        raise InvalidRequest(f"tensor of {dtype}: expected {', '.join(each.name for each in _NUMBERS)}")
    return number


def require_dtype(number: int, expected: np.dtype[Any], name: str) -> None:
    """Raise InvalidRequest naming the field unless the number is that of the expected element type."""
    if (sent := DTYPES.get(number)) != expected:
        raise InvalidRequest(f"{name}: expected dtype {expected.name}, got {sent.name if sent else 'none'}")


def require_finite(values: NDArray[Any], name: str) -> None:
    """Raise InvalidRequest naming the field if a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name}: contains NaN or infinity, expected finite numbers")


def tensor_content(array: NDArray[Any]) -> dict[str, Any]:
    """Return the fields of the message of an array of any shape."""
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return {"dtype": dtype_to_proto(array.dtype), "shape": array.shape, "data": data}


def _vector(message: tensor_pb2.Tensor, name: str, dtype: np.dtype[Any], length: int | None) -> NDArray[Any]:
    require_dtype(message.dtype, dtype, name)
    if len(message.shape) != 1 or message.shape[0] < 0:
        raise InvalidRequest(f"{name}: expected one dimension, got shape {list(message.shape)}")
    expected = message.shape[0] * dtype.itemsize
    data = message.data  # Each access copies the bytes.
    if len(data) != expected:
        raise InvalidRequest(
            f"{name}: shape {list(message.shape)} of {dtype.name} needs {expected} bytes, got {len(data)}"
        )
    if length is not None and message.shape[0] != length:
        raise InvalidRequest(f"{name}: expected {length} elements, got {message.shape[0]}")
    return np.frombuffer(data, dtype)


def ints_from_proto(message: tensor_pb2.Tensor, name: str, length: int | None = None) -> IntArray:
    """Return a one-dimensional int32 tensor. Raises InvalidRequest with the field's name."""
    return _vector(message, name, INT32, length)


def floats_from_proto(
    message: tensor_pb2.Tensor, name: str, length: int | None = None, finite: bool = True
) -> FloatArray:
    """Return a one-dimensional float32 tensor, of finite numbers. Raises InvalidRequest with the field's name."""
    values = _vector(message, name, FLOAT32, length)
    if finite:
        require_finite(values, name)
    return values


def experts_from_proto(message: tensor_pb2.Tensor, name: str) -> ExpertArray:
    """Return a tensor of experts, [tokens, layers, experts per token]. Raises InvalidRequest with the field's name."""
    dtype, shape = DTYPES.get(message.dtype), tuple(message.shape)
    if dtype not in EXPERTS:
        raise InvalidRequest(f"{name}: expected dtype uint8 or uint16, got {dtype.name if dtype else 'none'}")
    if len(shape) != 3 or min(shape) < 1:
        raise InvalidRequest(f"{name}: expected [tokens, layers, experts per token], got shape {list(shape)}")
    data = message.data  # Each access copies the bytes.
    if len(data) != (expected := math.prod(shape) * dtype.itemsize):
        raise InvalidRequest(f"{name}: shape {list(shape)} of {dtype.name} needs {expected} bytes, got {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape)
