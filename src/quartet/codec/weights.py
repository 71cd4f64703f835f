"""Messages of WeightService. All limits are checked before memory is taken for weights."""

from __future__ import annotations

import math

from quartet.errors import InvalidRequest
from quartet.v1 import weights_pb2
from quartet.weight_transfer.digests import DIGEST_BYTES
from quartet.weight_transfer.messages import (
    MAX_DIMENSIONS,
    MAX_ENCODED_BYTES,
    MAX_LINKS,
    MAX_MESSAGE_DATA,
    MAX_NAME_BYTES,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    MAX_WAIT_SECONDS,
    Chunk,
    Encoding,
    Manifest,
    Message,
    TensorLayout,
    WeightsRequest,
)
from quartet.weight_transfer.tensors import AdapterSettings, TensorType

_TYPES: dict[TensorType, weights_pb2.WeightType.ValueType] = {
    "F32": weights_pb2.WEIGHT_TYPE_F32,
    "BF16": weights_pb2.WEIGHT_TYPE_BF16,
    "F16": weights_pb2.WEIGHT_TYPE_F16,
}
_TYPE_NAMES = {number: name for name, number in _TYPES.items()}
_ENCODINGS = {
    Encoding.RAW: weights_pb2.CHUNK_ENCODING_RAW,
    Encoding.XOR_PLANES: weights_pb2.CHUNK_ENCODING_XOR_PLANES,
    Encoding.XOR_SPARSE: weights_pb2.CHUNK_ENCODING_XOR_SPARSE,
}
_ENCODING_NAMES = {number: encoding for encoding, number in _ENCODINGS.items()}
MAX_TARGET_MODULES = 4096
"""Maximum number of modules with an adapter."""


def weights_request_to_proto(request: WeightsRequest) -> weights_pb2.GetWeightsRequest:
    """Convert the arguments of GetWeights."""
    return weights_pb2.GetWeightsRequest(
        run=request.run,
        version=request.version,
        digest=request.digest,
        have_version=request.have_version,
        have_digest=request.have_digest,
        wait_seconds=request.wait_seconds,
    )


def weights_request_from_proto(message: weights_pb2.GetWeightsRequest) -> WeightsRequest:
    """Return the arguments of GetWeights. Raises InvalidRequest."""
    if not message.run:
        raise InvalidRequest("run: expected the name of the run")
    have = message.have_version if message.HasField("have_version") else None
    _check_digest(message.digest, "digest", optional=True)
    _check_digest(message.have_digest, "have_digest", optional=have is None)
    if not 0 <= message.wait_seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"wait_seconds {message.wait_seconds}: expected 0 to {MAX_WAIT_SECONDS:g}")
    return WeightsRequest(message.run, message.version, message.digest, have, message.have_digest, message.wait_seconds)


def weights_to_proto(message: Message) -> weights_pb2.GetWeightsResponse:
    """Convert one message of a stream of weights."""
    if not isinstance(message, Manifest):
        chunks = (
            weights_pb2.WeightChunk(
                tensor=chunk.tensor,
                index=chunk.index,
                encoding=_ENCODINGS[chunk.encoding],
                data=chunk.data if isinstance(chunk.data, bytes) else chunk.data.tobytes(),
            )
            for chunk in message
        )
        return weights_pb2.GetWeightsResponse(chunks=weights_pb2.WeightChunks(chunks=chunks))
    adapter = message.adapter
    manifest = weights_pb2.WeightManifest(
        run=message.run,
        version=message.version,
        digest=message.digest,
        tensors=(
            weights_pb2.WeightTensor(name=layout.name, dtype=_TYPES[layout.dtype], shape=layout.shape, digest=digest)
            for layout, digest in zip(message.layouts, message.digests, strict=True)
        ),
        adapter=None
        if adapter is None
        else weights_pb2.WeightAdapter(rank=adapter.rank, alpha=adapter.alpha, target_modules=adapter.target_modules),
        base_version=message.base_version,
        num_links=message.num_links,
        data_bytes=message.data_bytes,
    )
    return weights_pb2.GetWeightsResponse(manifest=manifest)


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
    if not 1 <= message.num_links <= MAX_LINKS:
        raise InvalidRequest(f"num_links {message.num_links}: expected 1 to {MAX_LINKS}")
    _check_digest(message.digest, "digest")
    return Manifest(
        message.run,
        message.version,
        message.digest,
        tuple(map(_layout, message.tensors)),
        tuple(tensor.digest for tensor in message.tensors),
        _adapter(message.adapter) if message.HasField("adapter") else None,
        message.base_version if message.HasField("base_version") else None,
        message.num_links,
        message.data_bytes,
    )


def _layout(message: weights_pb2.WeightTensor) -> TensorLayout:
    if not 1 <= len(message.name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"tensors.name {message.name[:80]!r}: expected 1 to {MAX_NAME_BYTES} bytes")
    dtype = _TYPE_NAMES.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"tensor {message.name}: dtype {message.dtype}: unknown")
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"tensor {message.name}: expected at most {MAX_DIMENSIONS} dimensions, got {len(message.shape)}"
        )
    _check_digest(message.digest, f"tensor {message.name}: digest")
    layout = TensorLayout(message.name, dtype, tuple(message.shape))
    if layout.num_bytes > MAX_TENSOR_BYTES:
        raise InvalidRequest(
            f"tensor {message.name}: shape {list(layout.shape)}: expected at most {MAX_TENSOR_BYTES} bytes"
        )
    return layout


def _adapter(message: weights_pb2.WeightAdapter) -> AdapterSettings:
    if message.rank < 1 or not math.isfinite(message.alpha):
        raise InvalidRequest(
            f"adapter: expected a rank of 1 or more and a finite alpha, got {message.rank}, {message.alpha}"
        )
    if len(message.target_modules) > MAX_TARGET_MODULES:
        raise InvalidRequest(
            f"adapter.target_modules: expected at most {MAX_TARGET_MODULES}, got {len(message.target_modules)}"
        )
    return AdapterSettings(message.rank, message.alpha, tuple(message.target_modules))


def _chunks(message: weights_pb2.WeightChunks) -> tuple[Chunk, ...]:
    chunks, size = [], 0
    for each in message.chunks:
        encoding = _ENCODING_NAMES.get(each.encoding)
        if encoding is None:
            raise InvalidRequest(f"chunks.encoding {each.encoding}: unknown")
        data = each.data
        size += len(data)
        if not 1 <= len(data) <= MAX_ENCODED_BYTES or size > MAX_MESSAGE_DATA:
            raise InvalidRequest(
                f"chunks: expected 1 to {MAX_ENCODED_BYTES} bytes in each and {MAX_MESSAGE_DATA} together, "
                f"got {len(data)} and {size}"
            )
        chunks.append(Chunk(each.tensor, each.index, encoding, data))
    if not chunks:
        raise InvalidRequest("chunks: expected at least one")
    return tuple(chunks)


def _check_digest(digest: bytes, name: str, *, optional: bool = False) -> None:
    if len(digest) != DIGEST_BYTES and (digest or not optional):
        raise InvalidRequest(f"{name}: expected {DIGEST_BYTES} bytes, got {len(digest)}")
