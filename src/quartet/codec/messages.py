"""Records as protobuf messages and back, by the names of their fields. Reading is strict; ``checks`` has the limits."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from quartet.codec.checks import CHECKS
from quartet.codec.tensors import experts_from_proto, floats_from_proto, ints_from_proto, tensor_content
from quartet.contract.arrays import ExpertArray, FloatArray, IntArray
from quartet.errors import ComputationFailed, InvalidRequest

AnyMessage = TypeVar("AnyMessage", bound=Message)
Record = TypeVar("Record")
Write = Callable[[Any], Any] | None
"""Converts a value for a message. None: as it is."""
Read = Callable[[Any, str], Any] | None
"""Converts a value of a message, with its path. None: as it is."""
_ARRAYS: dict[Any, Callable[..., Any]] = {
    IntArray: ints_from_proto,
    FloatArray: floats_from_proto,
    ExpertArray: experts_from_proto,
}


def to_message(message_type: type[AnyMessage], record: Any = None, /, **values: Any) -> AnyMessage:
    """Return a message with the fields of ``record``. ``values`` are further fields, or replace those of the record."""
    return message_type(**content(message_type, record, **values))


def content(message_type: type[Message], record: Any = None, /, **values: Any) -> dict[str, Any]:
    """Return the content of a message, which ``to_message`` also takes as a value for a field with this message type.

    A message as a value is serialised and parsed again.
    """
    descriptor: Any = message_type.DESCRIPTOR
    result = {} if record is None else _content(record, descriptor, values)
    for name, value in values.items():
        write = _writer(descriptor.fields_by_name[name])
        result[name] = value if write is None else write(value)
    return result


def from_message(record_type: type[Record], message: Any, path: str = "", /, **values: Any) -> Record:
    """Return the record in a message, with ``values`` in the place of the message's. Raises InvalidRequest with path and field.

    A field that the message type does not have keeps its default.
    """
    return _record(record_type, message, f"{path}." if path else "", values)  # type: ignore[no-any-return]


def _record(record_type: Any, message: Any, prefix: str, values: Mapping[str, Any] | None = None) -> Any:
    fields = dict(values) if values else {}
    for name, optional, read in _readers(record_type, message.DESCRIPTOR):
        if name in fields:
            continue
        if optional and not message.HasField(name):
            fields[name] = None
        else:
            value = getattr(message, name)
            fields[name] = value if read is None else read(value, prefix + name)
    try:
        record = record_type(**fields)
    except ComputationFailed as error:
        raise InvalidRequest(str(error)) from None
    check = CHECKS.get(record_type)
    if check is not None:
        check(record, prefix)
    return record


@cache
def _readers(record_type: Any, descriptor: Any) -> list[tuple[str, bool, Read]]:
    """Return the names of the common fields, whether they are optional, and the functions that read their values."""
    result = []
    for name, hint in get_type_hints(record_type).items():
        if name in descriptor.fields_by_name:
            optional, field = type(None) in get_args(hint), descriptor.fields_by_name[name]
            result.append((name, optional, _reader(get_args(hint)[0] if optional else hint, field)))
    return result


def _reader(hint: Any, field: Any) -> Read:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (dict, Mapping) and field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return lambda values, _: dict(values)
        key, value = (part.name for part in field.message_type.fields)
        return lambda pairs, _: {getattr(pair, key): getattr(pair, value) for pair in pairs}
    if field.is_repeated:
        read = _element_reader(arguments[0], field)
        if read is None:
            return lambda values, _: origin(values)
        return lambda values, path: origin([read(value, f"{path}[{i}]") for i, value in enumerate(values)])
    return _element_reader(hint, field)


def _element_reader(hint: Any, field: Any) -> Read:
    if hint in _ARRAYS:
        return _ARRAYS[hint]
    if is_dataclass(hint):
        return lambda message, path: _record(hint, message, f"{path}.")
    if field.enum_type is not None:
        numbers = numbers_of(field.enum_type)
        return _choice({numbers[member]: member for member in get_args(hint) or hint})
    if get_origin(hint) is Literal:
        return _choice({value: value for value in get_args(hint)})
    return None


def _choice(values: Mapping[Any, Any]) -> Read:
    def read(value: Any, path: str) -> Any:
        try:
            return values[value]
        except KeyError:
            raise InvalidRequest(f"{path} {value!r}: unknown, expected {', '.join(values.values())}") from None

    return read


def _content(record: Any, descriptor: Any, without: Container[str] = ()) -> dict[str, Any]:
    return {
        name: getattr(record, name) if write is None else write(getattr(record, name))
        for name, write in _writers(descriptor)
        if name not in without
    }


@cache
def _writers(descriptor: Any) -> list[tuple[str, Write]]:
    return [(field.name, _writer(field)) for field in descriptor.fields]


@cache
def _writer(field: Any) -> Write:
    message = field.message_type
    write: Callable[[Any], Any]
    if field.enum_type is not None:
        write = numbers_of(field.enum_type).__getitem__
    elif message is None:
        return bytes if field.type == field.TYPE_BYTES else None
    elif message.GetOptions().map_entry:
        each = _writer(message.fields_by_name["value"])
        return each and (lambda values: {name: each(value) for name, value in values.items()})
    elif message.full_name == "quartet.v1.Tensor":

        def write(array: Any) -> Any:
            return array if array is None else tensor_content(array)

    else:

        def write(record: Any) -> Any:
            return record if record is None or isinstance(record, dict) else _content(record, message)

    if not field.is_repeated:
        return write
    names = [part.name for part in message.fields] if message else []

    def write_all(values: Any) -> list[Any]:
        if isinstance(values, Mapping):
            return [dict(zip(names, pair, strict=True)) for pair in sorted(values.items())]
        return list(map(write, values))

    return write_all


@cache
def numbers_of(enumeration: Any) -> dict[str, int]:
    """Return the numbers of an enumeration by the values of records: X_A_B is "A_B", "a_b" or "a b". None is unspecified."""
    prefix = enumeration.values[0].name.removesuffix("UNSPECIFIED")
    labels = {value.name.removeprefix(prefix): value.number for value in enumeration.values[1:]}
    return {
        spelling: number
        for label, number in labels.items()
        for spelling in (label, label.lower(), label.lower().replace("_", " "))
    }
