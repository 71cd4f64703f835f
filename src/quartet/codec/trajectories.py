"""Messages of token batches, sampling parameters, and the entries of the rollout stream."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from quartet.codec.checks import MAX_SETTING
from quartet.codec.tensors import floats_from_proto, ints_from_proto, write_tensor
from quartet.errors import InvalidRequest
from quartet.types import FinishReason, SamplingParameters, TokenBatch, Trajectory, TrajectoryId
from quartet.v1 import trajectory_pb2

MAX_RESPONSE_TOKENS = 1_048_576
"""Maximum response tokens in a request."""

_FINISH = {
    FinishReason.EOS: trajectory_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASONS = {number: reason for reason, number in _FINISH.items()}


def batch_to_proto(batch: TokenBatch) -> trajectory_pb2.TokenBatch:
    """Convert ragged sequences."""
    message = trajectory_pb2.TokenBatch()
    write_batch(message, batch)
    return message


def write_batch(message: trajectory_pb2.TokenBatch, batch: TokenBatch) -> None:
    """Write ragged sequences into a message, which may be a field of another message. This saves two copies."""
    write_tensor(message.token_ids, batch.token_ids)
    write_tensor(message.prompt_lengths, batch.prompt_lengths)
    write_tensor(message.response_lengths, batch.response_lengths)


def batch_from_proto(message: trajectory_pb2.TokenBatch) -> TokenBatch:
    """Convert and validate ragged sequences. Raises InvalidRequest."""
    prompt_lengths = ints_from_proto(message.prompt_lengths, "prompt_lengths")
    return TokenBatch(
        token_ids=ints_from_proto(message.token_ids, "token_ids"),
        prompt_lengths=prompt_lengths,
        response_lengths=ints_from_proto(message.response_lengths, "response_lengths", len(prompt_lengths)),
    )


def sampling_to_proto(sampling: SamplingParameters) -> trajectory_pb2.SamplingParameters:
    """Convert sampling parameters."""
    return trajectory_pb2.SamplingParameters(
        max_response_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_proto(message: trajectory_pb2.SamplingParameters) -> SamplingParameters:
    """Convert and validate sampling parameters. Raises InvalidRequest."""
    if not 1 <= message.max_response_tokens <= MAX_RESPONSE_TOKENS:
        raise InvalidRequest(
            f"sampling.max_response_tokens {message.max_response_tokens}: expected 1 to {MAX_RESPONSE_TOKENS}"
        )
    if not 0 <= message.temperature <= MAX_SETTING:
        raise InvalidRequest(f"sampling.temperature {message.temperature}: expected 0 to {MAX_SETTING:g}")
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
    """Serialise a trajectory as the rollout stream stores it."""
    message = trajectory_pb2.Trajectory(
        id=trajectory_pb2.TrajectoryId(
            run=trajectory.id.run, step=trajectory.id.step, prompt=trajectory.id.prompt, sample=trajectory.id.sample
        ),
        policy_version=trajectory.policy_version,
        finish_reason=_FINISH[trajectory.finish_reason],
    )
    for name in ("prompt_ids", "response_ids", "log_probs"):
        write_tensor(getattr(message, name), getattr(trajectory, name))
    return message.SerializeToString()


def trajectory_from_bytes(data: bytes) -> Trajectory:
    """Parse the result of ``trajectory_to_bytes``. Raises InvalidRequest."""
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
