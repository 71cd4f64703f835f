"""What actor and critic learn from in one step, as it is sealed in the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from quartet.codec.tensors import floats_from_proto, tensor_to_proto
from quartet.codec.trajectories import batch_from_proto
from quartet.errors import InvalidRequest
from quartet.types import Experience
from quartet.v1 import experience_pb2, tensor_pb2, trajectory_pb2

_PER_TOKEN = ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask")


def experience_to_bytes(experience: Experience) -> bytes:
    """One step's experience, as it is sealed in the buffer.

    The bytes that the message would serialise to, put together from the arrays themselves: each is copied once instead of thrice.
    """
    head = experience_pb2.Experience(
        run=experience.run, step=experience.step, policy_version=experience.policy_version, ids=experience.ids
    )
    batch = [
        part
        for name in ("token_ids", "prompt_lengths", "response_lengths")
        for part in _field(trajectory_pb2.TokenBatch, name, _tensor_parts(getattr(experience.batch, name)))
    ]
    tensors = [
        part
        for name in ("scores", *_PER_TOKEN)
        for part in _field(experience_pb2.Experience, name, _tensor_parts(getattr(experience, name)))
    ]
    return b"".join([head.SerializeToString(), *_field(experience_pb2.Experience, "batch", batch), *tensors])


_Parts = Sequence[bytes | memoryview]
"""Bytes one after the other."""


def _tensor_parts(array: NDArray[Any]) -> _Parts:
    """A tensor's message."""
    contiguous = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    head = tensor_to_proto(contiguous[:0])
    head.shape[:] = contiguous.shape
    data = contiguous.view(np.uint8).data
    return [head.SerializeToString(), *(_field(tensor_pb2.Tensor, "data", [data]) if len(data) else [])]


def _field(message: type[Message], name: str, parts: _Parts) -> _Parts:
    """A field of bytes, or of a message's bytes: its number and wire type, the length, and what is in it."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    return [_varint(number << 3 | 2), _varint(sum(map(len, parts))), *parts]


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def experience_from_bytes(data: bytes) -> Experience:
    """Inverse of ``experience_to_bytes``. Raises InvalidRequest."""
    message = experience_pb2.Experience()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("experience: not a quartet.v1.Experience message") from None
    batch = batch_from_proto(message.batch)
    if len(message.ids) != len(batch):
        raise InvalidRequest(f"experience.ids: expected {len(batch)}, got {len(message.ids)}")
    tokens = int(batch.response_lengths.sum())
    per_token = {name: floats_from_proto(getattr(message, name), f"experience.{name}", tokens) for name in _PER_TOKEN}
    return Experience(
        run=message.run,
        step=message.step,
        policy_version=message.policy_version,
        ids=tuple(message.ids),
        batch=batch,
        scores=floats_from_proto(message.scores, "experience.scores", len(batch)),
        **per_token,
    )
