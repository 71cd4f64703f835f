"""Protobuf <-> types. The only module that knows protobuf's messages of data; everything it reads is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from quartet.errors import InvalidRequest
from quartet.types import (
    Experience,
    FinishReason,
    FloatArray,
    IntArray,
    OptimizationSettings,
    PolicyLossSettings,
    Role,
    SamplingParameters,
    SavedFile,
    SaveKind,
    Scores,
    ServiceStatus,
    TokenBatch,
    Trajectory,
    TrajectoryId,
    ValueLossSettings,
)
from quartet.v1 import (
    actor_pb2,
    critic_pb2,
    experience_pb2,
    reward_pb2,
    status_pb2,
    tensor_pb2,
    trajectory_pb2,
    update_pb2,
)

MAX_EPOCHS = 1000
"""Most passes over one step's experience that a request may ask for: an update cannot be interrupted."""

LARGEST = 1e30
"""Largest setting that a request may hold: what is computed in single precision ends at 3e38."""

MAX_RESPONSE_TOKENS = 1_048_576
"""Most tokens of a response that a request may ask for."""

_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")
_DTYPES = {tensor_pb2.DATA_TYPE_FLOAT32: _FLOAT32, tensor_pb2.DATA_TYPE_INT32: _INT32}
_DATA_TYPES = {dtype: number for number, dtype in _DTYPES.items()}
_FINISH = {
    FinishReason.EOS: trajectory_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASONS = {number: reason for reason, number in _FINISH.items()}
_ROLES = {
    Role.ACTOR: status_pb2.ROLE_ACTOR,
    Role.CRITIC: status_pb2.ROLE_CRITIC,
    Role.REWARD: status_pb2.ROLE_REWARD,
    Role.REFERENCE: status_pb2.ROLE_REFERENCE,
    Role.ORCHESTRATOR: status_pb2.ROLE_ORCHESTRATOR,
}
_ROLE_NAMES = {number: role for role, number in _ROLES.items()}
_KL_LOSSES = {"none": actor_pb2.KL_LOSS_NONE, "k2": actor_pb2.KL_LOSS_K2, "k3": actor_pb2.KL_LOSS_K3}
_KL_LOSS_NAMES = {number: name for name, number in _KL_LOSSES.items()}
_RATIO_LEVELS = {"token": actor_pb2.RATIO_LEVEL_TOKEN, "sequence": actor_pb2.RATIO_LEVEL_SEQUENCE}
_RATIO_LEVEL_NAMES = {number: name for name, number in _RATIO_LEVELS.items()}
_AGGREGATIONS = {
    "token_mean": actor_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
    "sequence_mean": actor_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN,
}
_AGGREGATION_NAMES = {number: name for name, number in _AGGREGATIONS.items()}


_SAVE_KINDS = {
    SaveKind.CHECKPOINT: update_pb2.SAVE_KIND_CHECKPOINT,
    SaveKind.MODEL: update_pb2.SAVE_KIND_MODEL,
    SaveKind.ADAPTER: update_pb2.SAVE_KIND_ADAPTER,
}
_SAVE_KIND_NAMES = {number: kind for kind, number in _SAVE_KINDS.items()}


def tensor_to_proto(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """A float32 or int32 array of any shape."""
    message = tensor_pb2.Tensor()
    _write_tensor(message, array)
    return message


def _write_tensor(message: tensor_pb2.Tensor, array: NDArray[Any]) -> None:
    data_type = _DATA_TYPES.get(array.dtype.newbyteorder("<"))
    if data_type is None:
        raise InvalidRequest(f"tensor of {array.dtype}: expected float32 or int32")
    message.dtype = data_type
    message.shape.extend(array.shape)
    message.data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _vector(message: tensor_pb2.Tensor, name: str, dtype: np.dtype[Any], length: int | None) -> NDArray[Any]:
    found = _DTYPES.get(message.dtype)
    if found != dtype:
        raise InvalidRequest(f"{name}: expected dtype {dtype.name}, got {found.name if found else 'none'}")
    if len(message.shape) != 1 or message.shape[0] < 0:
        raise InvalidRequest(f"{name}: expected one dimension, got shape {list(message.shape)}")
    expected = message.shape[0] * dtype.itemsize
    data = message.data  # A copy, each time.
    if len(data) != expected:
        raise InvalidRequest(
            f"{name}: shape {list(message.shape)} of {dtype.name} needs {expected} bytes, got {len(data)}"
        )
    if length is not None and message.shape[0] != length:
        raise InvalidRequest(f"{name}: expected {length} elements, got {message.shape[0]}")
    return np.frombuffer(data, dtype)


def ints_from_proto(message: tensor_pb2.Tensor, name: str, length: int | None = None) -> IntArray:
    """A one-dimensional int32 tensor. Raises InvalidRequest naming the field."""
    return _vector(message, name, _INT32, length)


def floats_from_proto(message: tensor_pb2.Tensor, name: str, length: int | None = None) -> FloatArray:
    """A one-dimensional float32 tensor of finite numbers. Raises InvalidRequest naming the field."""
    values = _vector(message, name, _FLOAT32, length)
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name}: found NaN or infinity, expected finite numbers")
    return values


def batch_to_proto(batch: TokenBatch) -> trajectory_pb2.TokenBatch:
    """Ragged sequences to their message."""
    message = trajectory_pb2.TokenBatch()
    write_batch(message, batch)
    return message


def write_batch(message: trajectory_pb2.TokenBatch, batch: TokenBatch) -> None:
    """Ragged sequences into their message, which may be a field: protobuf copies twice what is made first and put there then."""
    _write_tensor(message.token_ids, batch.token_ids)
    _write_tensor(message.prompt_lengths, batch.prompt_lengths)
    _write_tensor(message.response_lengths, batch.response_lengths)


def batch_from_proto(message: trajectory_pb2.TokenBatch) -> TokenBatch:
    """Ragged sequences from their message. Raises InvalidRequest."""
    prompt_lengths = ints_from_proto(message.prompt_lengths, "prompt_lengths")
    return TokenBatch(
        token_ids=ints_from_proto(message.token_ids, "token_ids"),
        prompt_lengths=prompt_lengths,
        response_lengths=ints_from_proto(message.response_lengths, "response_lengths", len(prompt_lengths)),
    )


def sampling_to_proto(sampling: SamplingParameters) -> trajectory_pb2.SamplingParameters:
    """Sampling parameters to their message."""
    return trajectory_pb2.SamplingParameters(
        max_response_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_proto(message: trajectory_pb2.SamplingParameters) -> SamplingParameters:
    """Sampling parameters from their message. Raises InvalidRequest."""
    if not 1 <= message.max_response_tokens <= MAX_RESPONSE_TOKENS:
        raise InvalidRequest(
            f"sampling.max_response_tokens {message.max_response_tokens}: expected 1 to {MAX_RESPONSE_TOKENS}"
        )
    if not 0 <= message.temperature <= LARGEST:
        raise InvalidRequest(f"sampling.temperature {message.temperature}: expected 0 to {LARGEST:g}")
    if not 0 < message.top_p <= 1:
        raise InvalidRequest(f"sampling.top_p {message.top_p}: expected more than 0 and at most 1")
    return SamplingParameters(
        max_response_tokens=message.max_response_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        ignore_eos=message.ignore_eos,
    )


def trajectory_to_bytes(trajectory: Trajectory) -> bytes:
    """The entry of the rollout stream."""
    message = trajectory_pb2.Trajectory(
        id=trajectory_pb2.TrajectoryId(
            run=trajectory.id.run, step=trajectory.id.step, prompt=trajectory.id.prompt, sample=trajectory.id.sample
        ),
        policy_version=trajectory.policy_version,
        finish_reason=_FINISH[trajectory.finish_reason],
    )
    for name in ("prompt_ids", "response_ids", "log_probs"):
        _write_tensor(getattr(message, name), getattr(trajectory, name))
    return message.SerializeToString()


def trajectory_from_bytes(data: bytes) -> Trajectory:
    """Inverse of ``trajectory_to_bytes``. Raises InvalidRequest."""
    message = trajectory_pb2.Trajectory()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("trajectory: not a quartet.v1.Trajectory message") from None
    response_ids = ints_from_proto(message.response_ids, "trajectory.response_ids")
    prompt_ids = ints_from_proto(message.prompt_ids, "trajectory.prompt_ids")
    reason = _FINISH_REASONS.get(message.finish_reason)
    if reason is None or not message.id.run or not len(response_ids) or not len(prompt_ids):
        raise InvalidRequest("trajectory: id, prompt_ids, response_ids and finish_reason are required")
    return Trajectory(
        id=TrajectoryId(message.id.run, message.id.step, message.id.prompt, message.id.sample),
        policy_version=message.policy_version,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        log_probs=floats_from_proto(message.log_probs, "trajectory.log_probs", len(response_ids)),
        finish_reason=reason,
    )


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


def optimization_to_proto(settings: OptimizationSettings) -> update_pb2.OptimizationSettings:
    """Optimisation settings to their message."""
    return update_pb2.OptimizationSettings(
        epochs=settings.epochs,
        mini_batches=settings.mini_batches,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        skip_non_finite=settings.skip_non_finite,
        micro_batch_tokens=settings.micro_batch_tokens,
    )


def optimization_from_proto(message: update_pb2.OptimizationSettings) -> OptimizationSettings:
    """Optimisation settings from their message. Raises InvalidRequest."""
    if message.mini_batches < 1:
        raise InvalidRequest("optimization.mini_batches 0: expected at least 1")
    if message.epochs > MAX_EPOCHS:
        raise InvalidRequest(f"optimization.epochs {message.epochs}: expected at most {MAX_EPOCHS}")
    _require_non_negative(message, "learning_rate", "max_grad_norm")
    return OptimizationSettings(
        epochs=message.epochs,
        mini_batches=message.mini_batches,
        learning_rate=message.learning_rate,
        max_grad_norm=message.max_grad_norm,
        seed=message.seed,
        skip_non_finite=message.skip_non_finite,
        micro_batch_tokens=message.micro_batch_tokens,
    )


def policy_loss_to_proto(loss: PolicyLossSettings) -> actor_pb2.PolicyLossSettings:
    """Policy loss settings to their message."""
    return actor_pb2.PolicyLossSettings(
        temperature=loss.temperature,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        entropy_bonus=loss.entropy_bonus,
        kl_loss=_KL_LOSSES[loss.kl_loss],
        kl_loss_coefficient=loss.kl_loss_coefficient,
        ratio_level=_RATIO_LEVELS[loss.ratio_level],
        aggregation=_AGGREGATIONS[loss.aggregation],
        importance_cap=loss.importance_cap,
        max_update_kl=loss.max_update_kl,
    )


def policy_loss_from_proto(message: actor_pb2.PolicyLossSettings) -> PolicyLossSettings:
    """Policy loss settings from their message. Raises InvalidRequest."""
    _require_non_negative(
        message,
        "clip_low",
        "clip_high",
        "dual_clip",
        "entropy_bonus",
        "kl_loss_coefficient",
        "importance_cap",
        "max_update_kl",
    )
    if 0 < message.dual_clip <= 1:
        raise InvalidRequest(f"loss.dual_clip {message.dual_clip}: expected 0 (off) or more than 1")
    kl_loss = _KL_LOSS_NAMES.get(message.kl_loss)
    if kl_loss is None:
        raise InvalidRequest(f"loss.kl_loss {message.kl_loss}: unknown")
    ratio_level = _RATIO_LEVEL_NAMES.get(message.ratio_level)
    if ratio_level is None:
        raise InvalidRequest(f"loss.ratio_level {message.ratio_level}: unknown")
    aggregation = _AGGREGATION_NAMES.get(message.aggregation)
    if aggregation is None:
        raise InvalidRequest(f"loss.aggregation {message.aggregation}: unknown")
    return PolicyLossSettings(
        temperature=positive(message.temperature, "loss.temperature"),
        clip_low=message.clip_low,
        clip_high=message.clip_high,
        dual_clip=message.dual_clip,
        entropy_bonus=message.entropy_bonus,
        kl_loss=kl_loss,  # type: ignore[arg-type]
        kl_loss_coefficient=message.kl_loss_coefficient,
        ratio_level=ratio_level,  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        importance_cap=message.importance_cap,
        max_update_kl=message.max_update_kl,
    )


def value_loss_to_proto(loss: ValueLossSettings) -> critic_pb2.ValueLossSettings:
    """Value loss settings to their message."""
    return critic_pb2.ValueLossSettings(value_clip=loss.value_clip)


def value_loss_from_proto(message: critic_pb2.ValueLossSettings) -> ValueLossSettings:
    """Value loss settings from their message. Raises InvalidRequest."""
    _require_non_negative(message, "value_clip")
    return ValueLossSettings(value_clip=message.value_clip)


def scores_to_proto(scores: Scores) -> reward_pb2.ScoreResponse:
    """Scores to their message."""
    parts = {name: tensor_to_proto(values) for name, values in scores.parts.items()}
    return reward_pb2.ScoreResponse(scores=tensor_to_proto(scores.total), parts=parts)


def scores_from_proto(message: reward_pb2.ScoreResponse, sequences: int) -> Scores:
    """Scores of so many sequences from their message. Raises InvalidRequest."""
    return Scores(
        total=floats_from_proto(message.scores, "scores", sequences),
        parts={name: floats_from_proto(values, f"parts.{name}", sequences) for name, values in message.parts.items()},
    )


def save_kind_to_proto(kind: SaveKind) -> update_pb2.SaveKind.ValueType:
    """What to save, to its enum."""
    return _SAVE_KINDS[kind]


def save_kind_from_proto(kind: update_pb2.SaveKind.ValueType) -> SaveKind:
    """What to save, from its enum. Raises InvalidRequest."""
    found = _SAVE_KIND_NAMES.get(kind)
    if found is None:
        raise InvalidRequest(f"kind {kind}: expected SAVE_KIND_CHECKPOINT, _MODEL or _ADAPTER")
    return found


def saved_file_to_proto(file: SavedFile) -> update_pb2.SavedFile:
    """One saved file to its message."""
    return update_pb2.SavedFile(path=file.path, bytes=file.bytes, sha256=file.sha256)


def saved_file_from_proto(message: update_pb2.SavedFile) -> SavedFile:
    """One saved file from its message."""
    return SavedFile(message.path, message.bytes, message.sha256)


def positive(value: float, name: str) -> float:
    """The value, when more than 0 and at most LARGEST. Raises InvalidRequest."""
    if not 0 < value <= LARGEST:
        raise InvalidRequest(f"{name} {value}: expected more than 0 and at most {LARGEST:g}")
    return value


def _require_non_negative(message: Any, *names: str) -> None:
    for name in names:
        value = getattr(message, name)
        if not 0 <= value <= LARGEST:
            raise InvalidRequest(f"{name} {value}: expected 0 to {LARGEST:g}")


def status_to_proto(status: ServiceStatus) -> status_pb2.RoleStatus:
    """One role's status to its message."""
    return status_pb2.RoleStatus(
        role=_ROLES[status.role],
        model=status.model,
        device=status.device,
        dtype=status.dtype,
        parameters=status.parameters,
        policy_version=status.policy_version,
        tokenizer_fingerprint=status.tokenizer_fingerprint,
        vocabulary_size=status.vocabulary_size,
        run=status.run,
        step=status.step,
        threads=status.threads,
        busy_seconds=status.busy_seconds,
        max_sequence_tokens=status.max_sequence_tokens,
        answers_as_reference=status.answers_as_reference,
        broken=status.broken,
        leader_epoch=status.leader_epoch,
        buffer_unreachable=status.buffer_unreachable,
        work_pending=status.work_pending,
        tokens=status.tokens,
        micro_batch_tokens=status.micro_batch_tokens,
        micro_batch_tokens_held=status.micro_batch_tokens_held,
        gradient_checkpointing=status.gradient_checkpointing,
        token_bytes=status.token_bytes,
        free_bytes=status.free_bytes,
    )


def status_from_proto(message: status_pb2.RoleStatus) -> ServiceStatus:
    """One role's status from its message. Raises InvalidRequest."""
    role = _ROLE_NAMES.get(message.role)
    if role is None:
        raise InvalidRequest(f"status.role {message.role}: unknown")
    return ServiceStatus(
        role=role,
        model=message.model,
        device=message.device,
        dtype=message.dtype,
        parameters=message.parameters,
        policy_version=message.policy_version,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocabulary_size=message.vocabulary_size,
        run=message.run,
        step=message.step,
        threads=message.threads,
        busy_seconds=dict(message.busy_seconds),
        max_sequence_tokens=message.max_sequence_tokens,
        answers_as_reference=message.answers_as_reference,
        broken=message.broken,
        leader_epoch=message.leader_epoch,
        buffer_unreachable=message.buffer_unreachable,
        work_pending=message.work_pending,
        tokens=dict(message.tokens),
        micro_batch_tokens=message.micro_batch_tokens,
        micro_batch_tokens_held=message.micro_batch_tokens_held,
        gradient_checkpointing=message.gradient_checkpointing,
        token_bytes=message.token_bytes,
        free_bytes=message.free_bytes,
    )
