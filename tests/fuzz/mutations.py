"""Mutations of a request: of its bytes on the wire, or of the fields in its descriptor."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quartet.v1 import tensor_pb2
from tests.unit.models import tiny

ESCAPE = "quartet-fuzz-escaped"
"""Last part of every path out of the run directory. No file of this name may exist outside."""
LARGE = 8 * 1024 * 1024
"""Bytes of the largest requests, which are rare."""

_PATHS = (
    f"../{ESCAPE}",
    f"../../../../{ESCAPE}",
    f"/tmp/{ESCAPE}",
    f"saved/../../{ESCAPE}",
    f"out/{ESCAPE}",
    f"..\\{ESCAPE}",
    f"saved/\0/../../{ESCAPE}",
    ".",
    "/",
    "saved/./x",
    "saved",
    "saved/0/config.json/below-a-file",
    "n" * 300,
    "deep/" * 100 + "x",
    "d/" * 3000 + "x",
    "checkpoints",
    "checkpoints/first/model.safetensors",
    "tab\tand\nnewline",
    "ünï/名前",
    "%2e%2e/x",
    "~/x",
)
_STRINGS = (
    *_PATHS,
    "",
    " ",
    "\0",
    "other",
    "*",
    "a:b:c",
    "quartet:fuzz:rollouts",
    "{}",
    "{",
    "[" * 2000,
    '{"a": ' * 500,
    "1e999",
    "NaN",
    "\u2028\u202e",
    "%s%n{0}",
    "x" * 5000,
    "é" * 100_000,
)
_DOUBLES = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 1e-300, 5e-324, 1e300, -1e300, 1e38, 0.5, 2.0, 1e-9)
_UINTS = (0, 1, 2, 3, 255, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
_TYPES: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def mutated(random: Random, request: Message, others: list[bytes]) -> bytes:
    """Return a valid request, or a mutation of its fields or bytes. ``others``: requests of other methods."""
    choice = random.random()
    if choice < 0.15:
        return request.SerializeToString()
    if choice < 0.7:
        fields = change_fields(random, request)
        return fields if random.random() < 0.9 else change_bytes(random, fields, others)
    return change_bytes(random, request.SerializeToString(), others)


# -- fields ------------------------------------------------------------------------------------------------------------


def change_fields(random: Random, request: Message) -> bytes:
    """Set one to three fields to values at or beyond a limit."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        fields = list(_all_fields(request))
        if fields:
            message, field = random.choice(fields)
            _change(random, message, field)
    return request.SerializeToString()


def _all_fields(message: Message) -> Iterator[tuple[Message, Any]]:
    """Yield every field of a message and of its nested messages, including absent ones."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            inner = getattr(message, field.name)
            for each in inner if field.is_repeated else [inner]:
                yield from _all_fields(each)


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _change(random: Random, message: Message, field: Any) -> None:
    if random.random() < 0.08:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(random, getattr(message, field.name), field)
    elif field.is_repeated:
        _change_list(random, message, field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        if isinstance(inner, tensor_pb2.Tensor):
            inner.CopyFrom(tensor(random, inner))
        else:
            random.choice((inner.Clear, inner.SetInParent))()
    elif field.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, field.name, _bytes(random, getattr(message, field.name)))
    else:
        setattr(message, field.name, _scalar(random, field, getattr(message, field.name)))


def _scalar(random: Random, field: Any, current: Any = 0) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(_STRINGS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return random.choice(_DOUBLES)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return random.choice([value for value in _DOUBLES if not math.isfinite(value) or abs(value) < 1e38])
    if field.type == FieldDescriptor.TYPE_ENUM and random.random() < 0.7:
        return random.randrange(len(field.enum_type.values) + 1)
    low, high = _TYPES[field.type]
    edges = [value for value in (*_UINTS, -1, low, high, high - 1, current + 1, current - 1) if low <= value <= high]
    return random.choice(edges)


def _change_list(random: Random, message: Message, field: Any) -> None:
    values = getattr(message, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        for _ in range(random.choice((1, 3, 200))):
            values.add()
        return
    results = list(values)
    change = random.randrange(6)
    if change == 0 and results:
        results.pop(random.randrange(len(results)))
    elif change == 1 and results:
        results[random.randrange(len(results))] = _scalar(random, field, 0)
    elif change == 2:
        results += [_scalar(random, field, 0)] * random.choice((1, 2, 1000))
    elif change == 3:
        results += results
    elif change == 4:
        random.shuffle(results)
    else:
        results = [_scalar(random, field, 0) for _ in results]
    if sum(len(value) if isinstance(value, str) else 8 for value in results) < LARGE:
        values[:] = results


def _change_map(random: Random, values: Any, field: Any) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    assert value.type != FieldDescriptor.TYPE_MESSAGE, "a map of messages in a request: add its mutation here"
    for name in list(values):
        if random.random() < 0.5:
            values[name] = _scalar(random, value)
    if random.random() < 0.4:
        for number in range(random.choice((1, 1, 2000))):
            values[f"{_scalar(random, key)}{number or ''}" if random.random() < 0.3 else f"k{number}"] = _scalar(
                random, value
            )


def _bytes(random: Random, current: bytes) -> bytes:
    return random.choice(
        (
            lambda: b"",
            lambda: current[: random.randrange(len(current) + 1)],
            lambda: current + b"\0" * random.choice((1, 4, 4096)),
            lambda: b"\xff" * len(current),
            lambda: random.randbytes(len(current)),
            lambda: struct.pack("<f", random.choice((math.nan, math.inf, -math.inf, 3e38))) * (len(current) // 4),
            lambda: (
                struct.pack("<i", random.choice((0, -1, 2**31 - 1, -(2**31), tiny.VOCABULARY))) * (len(current) // 4)
            ),
        )
    )()


def tensor(random: Random, current: tensor_pb2.Tensor) -> tensor_pb2.Tensor:
    """Return another tensor: a valid one that does not match the rest of the request, or an invalid one."""
    result = tensor_pb2.Tensor()
    result.CopyFrom(current)
    change = random.randrange(8)
    if change == 0:
        result.dtype = random.choice((0, 1, 2, 3, -1))  # type: ignore[assignment]
    elif change == 1:
        result.shape[:] = random.choice(
            (
                [],
                [0],
                [-1],
                [2**62],
                [2**63 - 1],
                [-(2**63)],
                [1, len(current.data) // 4],
                [len(current.data) // 4, 1],
                [1] * 5000,
            )
        )
    elif change == 2:
        result.data = _bytes(random, current.data)
    else:
        values = np.frombuffer(current.data[: len(current.data) // 4 * 4], "<i4").copy()
        values = _elements(random, values)
        result.dtype, result.data = tensor_pb2.DATA_TYPE_INT32, values.astype("<i4").tobytes()
        result.shape[:] = [len(values)]
    return result


def _elements(random: Random, values: Any) -> Any:
    edge = random.choice((0, 1, -1, 2**31 - 1, -(2**31), tiny.VOCABULARY, tiny.VOCABULARY - 1, 64, 65))
    change = random.randrange(5)
    if change == 0 and len(values):
        values[random.randrange(len(values))] = edge
    elif change == 1:
        values = np.append(values, edge)
    elif change == 2:
        values = values[: random.randrange(len(values) + 1)]
    elif change == 3:
        values = np.tile(values, random.choice((2, 3, 50)))
    else:
        values = np.full(random.choice((0, 1, 2, 63, 64, 65, 100_000)), abs(edge) % tiny.VOCABULARY)
    return values


# -- bytes -------------------------------------------------------------------------------------------------------------


def change_bytes(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """Mutate bytes. The result may be no valid message."""
    return random.choice(_BYTE_CHANGES)(random, data, others)[:LARGE]


def _flip(random: Random, data: bytes, _: list[bytes]) -> bytes:
    result = bytearray(data or b"\0")
    for _ in range(random.randint(1, 8)):
        result[random.randrange(len(result))] ^= 1 << random.randrange(8)
    return bytes(result)


def _noise(random: Random, data: bytes, _: list[bytes]) -> bytes:
    return random.randbytes(random.choice((1, 2, 5, 20, 200, 5000)))


def _cut(random: Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _repeat(random: Random, data: bytes, _: list[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    end = random.randint(start, len(data))
    return data[:start] + data[start:end] * random.choice((2, 3, 100)) + data[end:]


def _insert(random: Random, data: bytes, _: list[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.randint(1, 16)) + data[at:]


def _splice(random: Random, data: bytes, others: list[bytes]) -> bytes:
    other = random.choice(others) if others else b""
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _foreign(random: Random, data: bytes, others: list[bytes]) -> bytes:
    return random.choice(others) if others else b""


def _length(random: Random, data: bytes, _: list[bytes]) -> bytes:
    """Insert a field with a huge declared length."""
    at = random.randrange(len(data) + 1)
    tag = bytes([random.randrange(1, 16) << 3 | 2])
    claimed = _varint(random.choice((2**20, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1)))
    return data[:at] + tag + claimed + random.choice((b"", data[at:]))


def _nest(random: Random, data: bytes, _: list[bytes]) -> bytes:
    """Nest messages or groups deeper than a parser allows."""
    if random.random() < 0.5:
        return bytes([random.randrange(1, 12) << 3 | 3]) * random.choice((10, 101, 50_000))
    field, result = random.randrange(1, 12) << 3 | 2, data
    for _ in range(random.choice((10, 101, 300))):
        result = bytes([field]) + _varint(len(result)) + result
    return result


def _swell(random: Random, data: bytes, _: list[bytes]) -> bytes:
    size = random.choice((10_000, 10_000, 100_000, 100_000, 1_000_000, LARGE) if random.random() < 0.1 else (10_000,))
    return data + bytes([random.randrange(1, 16) << 3 | 2]) + _varint(size) + b"a" * size


def _varint(value: int) -> bytes:
    results = bytearray()
    while value > 127:
        results.append(value & 127 | 128)
        value >>= 7
    return bytes([*results, value])


_BYTE_CHANGES: tuple[Callable[[Random, bytes, list[bytes]], bytes], ...] = (
    _flip,
    _flip,
    _noise,
    _cut,
    _repeat,
    _insert,
    _splice,
    _foreign,
    _length,
    _nest,
    _swell,
)
