"""NumPy arrays as Tensor messages: element type, shape, and little-endian bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import FloatArray, IntArray
from quartet.errors import InvalidRequest
from quartet.v1 import tensor_pb2

FLOAT32, INT32, BOOL = np.dtype("<f4"), np.dtype("<i4"), np.dtype(np.bool_)
DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: FLOAT32,
    tensor_pb2.DATA_TYPE_INT32: INT32,
    tensor_pb2.DATA_TYPE_BOOL: BOOL,
}
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def dtype_to_proto(dtype: np.dtype[Any]) -> int:
    """Return the number of float32, int32 or bool. Raises InvalidRequest for any other type."""
    number = _NUMBERS.get(dtype.newbyteorder("<"))
    if number is None:
        raise InvalidRequest(f"tensor of {dtype}: expected float32, int32 or bool")
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
