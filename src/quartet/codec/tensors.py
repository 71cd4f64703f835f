"""NumPy arrays as Tensor messages: element type, shape, and little-endian bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import FloatArray, IntArray
from quartet.errors import InvalidRequest
from quartet.v1 import tensor_pb2

_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")
_DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: _FLOAT32,
    tensor_pb2.DATA_TYPE_INT32: _INT32,
    tensor_pb2.DATA_TYPE_BOOL: np.dtype(np.bool_),
}
_DATA_TYPES = {dtype: number for number, dtype in _DTYPES.items()}


def dtype_to_proto(dtype: np.dtype[Any]) -> tensor_pb2.DataType.ValueType:
    """Return the protobuf name of float32, int32 or bool. Raises InvalidRequest for any other type."""
    data_type = _DATA_TYPES.get(dtype.newbyteorder("<"))
    if data_type is None:
        raise InvalidRequest(f"tensor of {dtype}: expected float32, int32 or bool")
    return data_type


def dtype_from_proto(data_type: tensor_pb2.DataType.ValueType) -> np.dtype[Any] | None:
    """Return the element type, little-endian, or None for a number that names none."""
    return _DTYPES.get(data_type)


def require_finite(values: NDArray[Any], name: str) -> None:
    """Raise InvalidRequest naming the field if a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name}: contains NaN or infinity, expected finite numbers")


def tensor_to_proto(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """Convert a float32 or int32 array of any shape."""
    message = tensor_pb2.Tensor()
    write_tensor(message, array)
    return message


def write_tensor(message: tensor_pb2.Tensor, array: NDArray[Any]) -> None:
    """Write a float32 or int32 array into a message, which may be a field of another message. This saves a copy."""
    message.dtype = dtype_to_proto(array.dtype)
    message.shape.extend(array.shape)
    message.data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _vector(message: tensor_pb2.Tensor, name: str, dtype: np.dtype[Any], length: int | None) -> NDArray[Any]:
    sent = dtype_from_proto(message.dtype)
    if sent != dtype:
        raise InvalidRequest(f"{name}: expected dtype {dtype.name}, got {sent.name if sent else 'none'}")
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
    return _vector(message, name, _INT32, length)


def floats_from_proto(message: tensor_pb2.Tensor, name: str, length: int | None = None) -> FloatArray:
    """Return a one-dimensional float32 tensor of finite numbers. Raises InvalidRequest with the field's name."""
    values = _vector(message, name, _FLOAT32, length)
    require_finite(values, name)
    return values


def scores_or_nan_from_proto(message: tensor_pb2.Tensor, name: str, length: int) -> FloatArray:
    """Return a one-dimensional float32 tensor, in which NaN stands for a missing score. Raises InvalidRequest."""
    return _vector(message, name, _FLOAT32, length)
