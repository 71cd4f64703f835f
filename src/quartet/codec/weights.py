"""Messages of WeightService. All limits are checked before memory is taken for weights."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from quartet.codec.checks import check_digest, within
from quartet.codec.messages import content, from_message, numbers_of, to_message
from quartet.errors import InvalidRequest
from quartet.v1 import weights_pb2
from quartet.weight_transfer.descriptors import SOCKET_NAME
from quartet.weight_transfer.messages import (
    HANDLE_BYTES,
    MAX_DIMENSIONS,
    MAX_ENCODED_BYTES,
    MAX_LINKS,
    MAX_MESSAGE_DATA,
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    Chunk,
    Encoding,
    Manifest,
    Message,
    TensorLayout,
)
from quartet.weight_transfer.tensors import DIGEST_VERSION, ITEM_BYTES

WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
_TYPES = numbers_of(weights_pb2.WeightType.DESCRIPTOR)
_TYPE_NAMES = {_TYPES[name]: name for name in ITEM_BYTES}
_ENCODINGS = numbers_of(weights_pb2.ChunkEncoding.DESCRIPTOR)
_ENCODING_NAMES = {_ENCODINGS[encoding]: encoding for encoding in Encoding}
# Tags of protobuf, one byte each: the number of the field times 8, plus 2 for bytes and messages and 0 for integers.
_CHUNKS = bytes([8 * weights_pb2.GetWeightsResponse.CHUNKS_FIELD_NUMBER + 2])
_CHUNK = bytes([8 * weights_pb2.WeightChunks.CHUNKS_FIELD_NUMBER + 2])
_TENSOR, _INDEX, _ENCODING, _DATA = (
    bytes([8 * number + kind])
    for number, kind in (
        (weights_pb2.WeightChunk.TENSOR_FIELD_NUMBER, 0),
        (weights_pb2.WeightChunk.INDEX_FIELD_NUMBER, 0),
        (weights_pb2.WeightChunk.ENCODING_FIELD_NUMBER, 0),
        (weights_pb2.WeightChunk.DATA_FIELD_NUMBER, 2),
    )
)


def weights_to_bytes(message: Message) -> bytes:
    """Return one message of a stream of weights, serialised. The bytes of chunks are copied once, not by protobuf."""
    if not isinstance(message, Manifest):
        parts: list[bytes | memoryview] = []
        for chunk in message:
            numbers = b"".join(
                (
                    _TENSOR,
                    _varint(chunk.tensor),
                    _INDEX,
                    _varint(chunk.index),
                    _ENCODING,
                    _varint(_ENCODINGS[chunk.encoding]),
                )
            )
            head = numbers + _DATA + _varint(len(chunk.data))
            parts += [_CHUNK + _varint(len(head) + len(chunk.data)) + head, chunk.data]
        return b"".join([_CHUNKS + _varint(sum(map(len, parts))), *parts])
    places = message.places or ((0, 0),) * len(message.layouts)
    tensors = [
        {
            "name": layout.name,
            "dtype": _TYPES[layout.dtype],
            "shape": layout.shape,
            "digest": digest,
            "region": region,
            "offset": offset,
        }
        for layout, digest, (region, offset) in zip(message.layouts, message.digests, places, strict=True)
    ]
    manifest = content(weights_pb2.WeightManifest, message, tensors=tensors, digest_version=DIGEST_VERSION)
    return to_message(weights_pb2.GetWeightsResponse, manifest=manifest).SerializeToString()


def weights_from_bytes(data: bytes) -> Message:
    """Return one message of a stream of weights. Raises InvalidRequest."""
    if data.startswith(_CHUNKS) and (chunks := _read_chunks(memoryview(data))) is not None:
        return _checked(chunks)
    try:
        message = weights_pb2.GetWeightsResponse.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"weights: not a message of a stream of weights ({error})") from None
    kind = message.WhichOneof("content")
    if kind == "manifest":
        return _manifest(message.manifest)
    if kind == "chunks":
        return _checked(tuple(from_message(Chunk, each, "chunks") for each in message.chunks.chunks))
    raise InvalidRequest("weights: expected a manifest or chunks")


def _read_chunks(data: memoryview) -> tuple[Chunk, ...] | None:
    """Return chunks whose data are views of a message as ``weights_to_bytes`` makes it; None for any other message."""
    chunks, end = [], len(data)
    try:
        length, at = _read_varint(data, len(_CHUNKS))
        if at + length != end:
            return None
        while at < end:
            fields = []
            for tag in (_CHUNK, _TENSOR, _INDEX, _ENCODING, _DATA):
                if data[at] != tag[0]:
                    return None
                value, at = _read_varint(data, at + 1)
                fields.append(value)
                if tag is _CHUNK:
                    begin = at
            length, tensor, index, encoding, size = fields
            chunks.append(Chunk(tensor, index, _ENCODING_NAMES[encoding], data[at : at + size]))
            at += size
            if at != begin + length:
                return None
    except (IndexError, KeyError):
        return None
    return tuple(chunks) if at == end else None


def _varint(value: int) -> bytes:
    """Return an integer of at least 0 as protobuf's varint."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, of at most 32 bits, and the place after it. Raises IndexError."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def _manifest(message: weights_pb2.WeightManifest) -> Manifest:
    if len(message.tensors) > MAX_TENSORS:
        raise InvalidRequest(f"tensors: expected at most {MAX_TENSORS}, got {len(message.tensors)}")
    if message.digest_version != DIGEST_VERSION:
        raise InvalidRequest(
            f"digest_version {message.digest_version}: expected {DIGEST_VERSION}; run the same version of Quartet on both sides"
        )
    check_digest(message.digest, "digest", required=True)
    layouts = tuple(map(_layout, message.tensors))
    digests = tuple(tensor.digest for tensor in message.tensors)
    if (count := len(message.regions)) > MAX_REGIONS:
        raise InvalidRequest(f"regions: expected at most {MAX_REGIONS}, got {count}")
    for region in message.regions:
        if region.socket and not SOCKET_NAME.fullmatch(region.socket):
            raise InvalidRequest(
                f"regions.socket {region.socket[:80]!r}: expected the name of a socket, such as weights-{'0f' * 16}"
            )
    places = tuple((tensor.region, tensor.offset) for tensor in message.tensors) if count else ()
    if any(region >= count for region, _ in places):
        raise InvalidRequest(f"tensors.region: expected less than {count}")
    if len(message.ranks) > MAX_RANKS:
        raise InvalidRequest(f"ranks: expected at most {MAX_RANKS}, got {len(message.ranks)}")
    if any(not len(rank.tensors) == len(rank.begins) == len(rank.sizes) for rank in message.ranks):
        raise InvalidRequest("ranks: expected equally many tensors, begins and sizes")
    if message.HasField("device") and (not count or len(message.device.handle) != HANDLE_BYTES):
        raise InvalidRequest(
            f"device: expected a handle of {HANDLE_BYTES} bytes, with regions, got {len(message.device.handle)} bytes and "
            f"{count} regions"
        )
    manifest = from_message(Manifest, message, layouts=layouts, digests=digests, places=places)
    within(manifest, "", 1, MAX_LINKS, "num_links")
    return manifest


def _layout(message: weights_pb2.WeightTensor) -> TensorLayout:
    if not 1 <= len(message.name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"tensors.name {message.name[:80]!r}: expected 1 to {MAX_NAME_BYTES} bytes")
    name = f"tensor {message.name}"
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{name}: expected at most {MAX_DIMENSIONS} dimensions, got {len(message.shape)}")
    dtype = _TYPE_NAMES.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"{name}: dtype {message.dtype}: unknown, expected {', '.join(ITEM_BYTES)}")
    check_digest(message.digest, f"{name}: digest", required=True)
    layout = TensorLayout(message.name, dtype, tuple(message.shape))
    if layout.num_bytes > MAX_TENSOR_BYTES:
        raise InvalidRequest(f"{name}: shape {list(layout.shape)}: expected at most {MAX_TENSOR_BYTES} bytes")
    return layout


def _checked(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    size = 0
    for each in chunks:
        size += len(each.data)
        if not 1 <= len(each.data) <= MAX_ENCODED_BYTES or size > MAX_MESSAGE_DATA:
            raise InvalidRequest(
                f"chunks: expected 1 to {MAX_ENCODED_BYTES} bytes in each and {MAX_MESSAGE_DATA} together, "
                f"got {len(each.data)} and {size}"
            )
    if not chunks:
        raise InvalidRequest("chunks: expected at least one")
    return chunks
