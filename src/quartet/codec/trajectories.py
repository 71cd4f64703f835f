"""Messages of token batches, sampling parameters, and the entries of the rollout stream."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from quartet.codec.checks import DIGEST_BYTES, MAX_SETTING
from quartet.codec.tensors import floats_from_proto, ints_from_proto, write_tensor
from quartet.errors import InvalidRequest
from quartet.types import FinishReason, SamplingParameters, TokenBatch, Trajectory, TrajectoryId, VersionSpan
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
        weights_digest=trajectory.weights_digest,
        generator=trajectory.generator,
        attempt=trajectory.attempt,
        version_spans=[
            trajectory_pb2.VersionSpan(
                policy_version=span.policy_version, weights_digest=span.weights_digest, tokens=span.tokens
            )
            for span in trajectory.version_spans
        ],
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
    spans = tuple(VersionSpan(item.policy_version, item.weights_digest, item.tokens) for item in message.version_spans)
    if spans and (sum(span.tokens for span in spans) != len(response_ids) or not all(span.tokens for span in spans)):
        raise InvalidRequest(
            f"trajectory.version_spans: expected spans that cover the {len(response_ids)} response tokens"
        )
    digests = (message.weights_digest, *(span.weights_digest for span in spans))
    if any(len(digest) not in (0, DIGEST_BYTES) for digest in digests):
        raise InvalidRequest(f"trajectory.weights_digest: expected {DIGEST_BYTES} bytes, or none")
    log_probs = floats_from_proto(message.log_probs, "trajectory.log_probs")
    if len(log_probs) not in (0, len(response_ids)):
        raise InvalidRequest(f"trajectory.log_probs: expected {len(response_ids)} elements, or none")
    return Trajectory(
        id=TrajectoryId(message.id.run, message.id.step, message.id.prompt, message.id.sample),
        policy_version=message.policy_version,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        log_probs=log_probs,
        finish_reason=reason,
        weights_digest=message.weights_digest,
        generator=message.generator,
        version_spans=spans,
        attempt=message.attempt,
    )
