"""Messages of token batches, sampling parameters, and the entries of the rollout stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from quartet.codec.checks import DIGEST_BYTES
from quartet.codec.outcomes import details_from_proto, details_to_proto, outcome_from_proto, outcome_to_proto
from quartet.codec.tensors import floats_from_proto, ints_from_proto, write_tensor
from quartet.config.rollout import check_stop_strings
from quartet.config.section import MAX_SETTING
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import (
    NO_LOG_PROBS,
    FinishReason,
    Outcome,
    Segment,
    SegmentRole,
    TokenBatch,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from quartet.errors import InvalidRequest
from quartet.v1 import trajectory_pb2

MAX_RESPONSE_TOKENS = 1_048_576
"""Maximum response tokens in a request."""

_FINISH = {
    FinishReason.EOS: trajectory_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
    FinishReason.DONE: trajectory_pb2.FINISH_REASON_DONE,
    FinishReason.FAILED: trajectory_pb2.FINISH_REASON_FAILED,
}
_FINISH_REASONS = {number: reason for reason, number in _FINISH.items()}
_ROLES = {role: trajectory_pb2.SegmentRole.Value(f"SEGMENT_ROLE_{role.name}") for role in SegmentRole}
_SEGMENT_ROLES = {number: role for role, number in _ROLES.items()}


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
        min_p=sampling.min_p,
        stop_strings=sampling.stop_strings,
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
    if not 0 <= message.min_p <= 1:
        raise InvalidRequest(f"sampling.min_p {message.min_p}: expected 0 to 1")
    try:
        check_stop_strings(message.stop_strings)
    except ValueError as error:
        raise InvalidRequest(f"sampling.stop_strings: {error}") from None
    return SamplingParameters(
        max_response_tokens=message.max_response_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        ignore_eos=message.ignore_eos,
        min_p=message.min_p,
        stop_strings=tuple(message.stop_strings),
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
        turn_rewards=trajectory.turn_rewards,
        outcome=outcome_to_proto(trajectory.outcome),
        detail=details_to_proto([trajectory.detail])[0],
    )
    for segment in trajectory.segments:
        entry = message.segments.add(role=_ROLES[segment.role], policy_version=segment.policy_version)
        write_tensor(entry.token_ids, segment.token_ids)
        if len(segment.log_probs):
            write_tensor(entry.log_probs, segment.log_probs)
    return message.SerializeToString()


def trajectory_from_bytes(data: bytes) -> Trajectory:
    """Parse the result of ``trajectory_to_bytes``. Raises InvalidRequest."""
    message = trajectory_pb2.Trajectory()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("trajectory: not a quartet.v1.Trajectory message") from None
    reason = _FINISH_REASONS.get(message.finish_reason)
    if reason is None or not message.id.run:
        raise InvalidRequest("trajectory: id and finish_reason are required")
    outcome = outcome_from_proto(message.outcome, "trajectory.outcome")
    if (reason is FinishReason.FAILED) != (outcome is not Outcome.OK):
        raise InvalidRequest(f"trajectory: outcome {outcome} with finish_reason {reason}; expected ok, or failed")
    segments = tuple(_segment_from_proto(entry, index) for index, entry in enumerate(message.segments))
    turns = [segment for segment in segments if segment.role is SegmentRole.POLICY]
    _check_segments(segments, turns, outcome)
    spans = tuple(VersionSpan(item.policy_version, item.weights_digest, item.tokens) for item in message.version_spans)
    tokens = sum(len(turn.token_ids) for turn in turns)
    if spans and (sum(span.tokens for span in spans) != tokens or not all(span.tokens for span in spans)):
        raise InvalidRequest(f"trajectory.version_spans: expected spans that cover the {tokens} tokens of the policy")
    digests = (message.weights_digest, *(span.weights_digest for span in spans))
    if any(len(digest) not in (0, DIGEST_BYTES) for digest in digests):
        raise InvalidRequest(f"trajectory.weights_digest: expected {DIGEST_BYTES} bytes, or none")
    rewards = tuple(message.turn_rewards)
    if rewards and (len(rewards) != len(turns) or outcome is not Outcome.OK):
        raise InvalidRequest(
            f"trajectory.turn_rewards: expected {len(turns)}, one per turn, or none; none for a failure"
        )
    if not all(map(math.isfinite, rewards)):
        raise InvalidRequest("trajectory.turn_rewards: contains NaN or infinity, expected finite numbers")
    return Trajectory(
        id=TrajectoryId(message.id.run, message.id.step, message.id.prompt, message.id.sample),
        policy_version=message.policy_version,
        segments=segments,
        finish_reason=reason,
        weights_digest=message.weights_digest,
        generator=message.generator,
        version_spans=spans,
        attempt=message.attempt,
        turn_rewards=rewards,
        outcome=outcome,
        detail=details_from_proto([message.detail])[0],
    )


def _segment_from_proto(message: trajectory_pb2.Segment, index: int) -> Segment:
    name, role = f"trajectory.segments[{index}]", _SEGMENT_ROLES.get(message.role)
    token_ids = ints_from_proto(message.token_ids, f"{name}.token_ids")
    if role is None or not len(token_ids):
        raise InvalidRequest(f"{name}: expected a role, and at least one token")
    log_probs = NO_LOG_PROBS
    if message.HasField("log_probs"):
        if role is not SegmentRole.POLICY:
            raise InvalidRequest(f"{name}.log_probs: expected none for the role {role}")
        log_probs = floats_from_proto(message.log_probs, f"{name}.log_probs", len(token_ids))
    return Segment(role, token_ids, log_probs, message.policy_version)


def _check_segments(segments: Sequence[Segment], turns: Sequence[Segment], outcome: Outcome) -> None:
    """Raise InvalidRequest unless the prompt comes first, and only there, and a turn comes last."""
    roles = [segment.role for segment in segments]
    if roles[:1] != [SegmentRole.PROMPT] or SegmentRole.PROMPT in roles[1:]:
        raise InvalidRequest("trajectory.segments: expected one prompt, as the first segment")
    if outcome is Outcome.OK and roles[-1] is not SegmentRole.POLICY:
        raise InvalidRequest("trajectory.segments: expected a segment of the policy at the end")
    if len({len(turn.log_probs) > 0 for turn in turns}) > 1:
        raise InvalidRequest("trajectory.segments: expected log-probs in all segments of the policy, or in none")
