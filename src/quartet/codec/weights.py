"""Messages of WeightService. All limits are checked before memory is taken for weights."""

from __future__ import annotations

from quartet.codec.checks import check_digest, within
from quartet.codec.messages import content, from_message, numbers_of, to_message
from quartet.errors import InvalidRequest
from quartet.v1 import weights_pb2
from quartet.weight_transfer.messages import (
    MAX_DIMENSIONS,
    MAX_ENCODED_BYTES,
    MAX_LINKS,
    MAX_MESSAGE_DATA,
    MAX_NAME_BYTES,
    MAX_REGIONS,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    Chunk,
    Manifest,
    Message,
    TensorLayout,
)
from quartet.weight_transfer.tensors import ITEM_BYTES

_TYPES = numbers_of(weights_pb2.WeightType.DESCRIPTOR)
_TYPE_NAMES = {_TYPES[name]: name for name in ITEM_BYTES}


def weights_to_proto(message: Message) -> weights_pb2.GetWeightsResponse:
    """Convert one message of a stream of weights."""
    if isinstance(message, Manifest):
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
        manifest = content(weights_pb2.WeightManifest, message, tensors=tensors)
        return to_message(weights_pb2.GetWeightsResponse, manifest=manifest)
    return to_message(weights_pb2.GetWeightsResponse, chunks=content(weights_pb2.WeightChunks, chunks=message))


def weights_from_proto(message: weights_pb2.GetWeightsResponse) -> Message:
    """Return one message of a stream of weights. Raises InvalidRequest."""
    kind = message.WhichOneof("content")
    if kind == "manifest":
        return _manifest(message.manifest)
    if kind == "chunks":
        return _chunks(message.chunks)
    raise InvalidRequest("weights: expected a manifest or chunks")


def _manifest(message: weights_pb2.WeightManifest) -> Manifest:
    if len(message.tensors) > MAX_TENSORS:
        raise InvalidRequest(f"tensors: expected at most {MAX_TENSORS}, got {len(message.tensors)}")
    check_digest(message.digest, "digest", required=True)
    layouts = tuple(map(_layout, message.tensors))
    digests = tuple(tensor.digest for tensor in message.tensors)
    if (count := len(message.regions)) > MAX_REGIONS:
        raise InvalidRequest(f"regions: expected at most {MAX_REGIONS}, got {count}")
    places = tuple((tensor.region, tensor.offset) for tensor in message.tensors) if count else ()
    if any(region >= count for region, _ in places):
        raise InvalidRequest(f"tensors.region: expected less than {count}")
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


def _chunks(message: weights_pb2.WeightChunks) -> tuple[Chunk, ...]:
    chunks, size = tuple(from_message(Chunk, each, "chunks") for each in message.chunks), 0
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
