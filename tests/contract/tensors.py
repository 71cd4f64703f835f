"""Tensor messages of arrays."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from quartet.codec.tensors import tensor_content
from quartet.v1 import tensor_pb2


def tensor_message(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """Return the message of an array of any shape."""
    return tensor_pb2.Tensor(**tensor_content(array))
