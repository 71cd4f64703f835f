"""Sealed experience: a manifest message and the chunks that it names. See proto/quartet/v1/experience.proto."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from quartet.codec.tensors import BOOL, DTYPES, EXPERTS, FLOAT32, INT32, dtype_to_proto, require_dtype, require_finite
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.errors import InvalidRequest
from quartet.v1 import experience_pb2

EXPERIENCE_CHUNK_BYTES = 64 * 2**20
"""Size of a chunk: an eighth of the 512 MB that Redis allows for a value."""
_BATCH = ("token_ids", "prompt_lengths", "response_lengths")
_PER_TOKEN = ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask")


@dataclass(frozen=True, slots=True)
class EncodedExperience:
    """The manifest message of a step's experience, and its chunks by SHA-256 in hexadecimal. Chunks are views of the arrays."""

    manifest: bytes
    chunks: Mapping[str, memoryview]


def encode_experience(experience: Experience, chunk_bytes: int = EXPERIENCE_CHUNK_BYTES) -> EncodedExperience:
    """Split a step's experience into chunks of at most ``chunk_bytes`` and describe them in a manifest."""
    manifest = experience_pb2.ExperienceManifest(
        run=experience.run, step=experience.step, policy_version=experience.policy_version, ids=experience.ids
    )
    arrays = {name: getattr(experience.batch, name) for name in _BATCH}
    arrays |= {name: getattr(experience, name) for name in ("scores", *_PER_TOKEN, "response_mask")}
    if experience.batch.routed_experts is not None:
        arrays["routed_experts"] = experience.batch.routed_experts
    chunks: dict[str, memoryview] = {}
    for name, array in arrays.items():
        entry = getattr(manifest, name)
        entry.dtype, entry.length = dtype_to_proto(array.dtype), array.size
        entry.row_shape.extend(array.shape[1:])
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), chunk_bytes):
            chunk = data[start : start + chunk_bytes]
            digest = hashlib.sha256(chunk)
            entry.chunks.append(digest.digest())
            chunks[digest.hexdigest()] = chunk
    return EncodedExperience(manifest.SerializeToString(), chunks)


def decode_experience(
    manifest: bytes, read_chunk: Callable[[str], bytes | memoryview | None], for_policy: bool = True
) -> Experience:
    """Return the experience that ``encode_experience`` encoded.

    ``read_chunk`` returns the chunk with the given SHA-256, or None if it is missing. ``for_policy``: with the experts of tokens,
    if there are any. Raises InvalidRequest if the manifest is
    malformed, if a chunk is missing or not the one that the manifest names, or if the arrays do not fit together.
    """
    message = experience_pb2.ExperienceManifest()
    try:
        message.ParseFromString(manifest)
    except DecodeError:
        raise InvalidRequest("experience: not a quartet.v1.ExperienceManifest message") from None

    def read(name: str, dtype: np.dtype[Any], length: int | None = None) -> NDArray[Any]:
        return _read_array(getattr(message, name), f"experience.{name}", dtype, length, read_chunk)

    token_ids, prompt_lengths, response_lengths = (read(name, INT32) for name in _BATCH)
    batch = TokenBatch(token_ids, prompt_lengths, response_lengths)
    if for_policy and message.HasField("routed_experts"):
        batch = replace(batch, routed_experts=_read_experts(message.routed_experts, read_chunk))
    if len(message.ids) != len(batch):
        raise InvalidRequest(f"experience.ids: expected {len(batch)}, got {len(message.ids)}")
    tokens = int(batch.response_lengths.sum(dtype=np.int64))
    mask = read("response_mask", BOOL, tokens if message.response_mask.length else 0)
    return Experience(
        run=message.run,
        step=message.step,
        policy_version=message.policy_version,
        ids=tuple(message.ids),
        batch=batch,
        scores=read("scores", FLOAT32, len(batch) if message.scores.length else 0),
        **{name: read(name, FLOAT32, tokens) for name in _PER_TOKEN},
        response_mask=mask,
    )


def _read_experts(
    entry: experience_pb2.SealedArray, read_chunk: Callable[[str], bytes | memoryview | None]
) -> NDArray[Any]:
    name, dtype, shape = "experience.routed_experts", DTYPES.get(entry.dtype), tuple(entry.row_shape)
    if dtype not in EXPERTS or len(shape) != 2 or not (size := math.prod(shape)) or entry.length % size:
        raise InvalidRequest(
            f"{name}: expected [tokens, layers, experts per token] of uint8 or uint16, got {entry.length} elements of "
            f"{dtype.name if dtype else 'none'} in rows of {list(shape)}"
        )
    return _read_array(entry, name, dtype, None, read_chunk).reshape(-1, *shape)


def _read_array(
    entry: experience_pb2.SealedArray,
    name: str,
    dtype: np.dtype[Any],
    length: int | None,
    read_chunk: Callable[[str], bytes | memoryview | None],
) -> NDArray[Any]:
    require_dtype(entry.dtype, dtype, name)
    if length is not None and entry.length != length:
        raise InvalidRequest(f"{name}: expected {length} elements, got {entry.length}")
    chunks = []
    for index, digest in enumerate(entry.chunks):
        chunk = read_chunk(digest.hex())
        if chunk is None:
            raise InvalidRequest(f"{name}: chunk {index} of {len(entry.chunks)} is missing")
        if hashlib.sha256(chunk).digest() != digest:
            raise InvalidRequest(f"{name}: chunk {index} of {len(entry.chunks)} does not match its SHA-256")
        chunks.append(chunk)
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(data) != entry.length * dtype.itemsize:
        raise InvalidRequest(
            f"{name}: {entry.length} elements of {dtype.name} need {entry.length * dtype.itemsize} bytes, got {len(data)}"
        )
    array = np.frombuffer(data, dtype)
    if dtype == FLOAT32:
        require_finite(array, name)
    if dtype == BOOL and array.view(np.uint8).max(initial=0) > 1:
        raise InvalidRequest(f"{name}: expected bytes 0 and 1")
    return array
