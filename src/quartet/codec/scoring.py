"""Messages of the scoring calls: Score, Values and LogProbs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quartet.codec.checks import positive
from quartet.codec.outcomes import details_from_proto, details_to_proto, outcome_from_proto, outcome_to_proto
from quartet.codec.tensors import floats_from_proto, scores_or_nan_from_proto, tensor_to_proto
from quartet.codec.trajectories import batch_from_proto, write_batch
from quartet.contract.arrays import FloatArray
from quartet.contract.logged_values import problem_of
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.contract.weights import ReferenceVersion
from quartet.errors import ComputationFailed, InvalidRequest
from quartet.v1 import actor_pb2, critic_pb2, reference_pb2, reward_pb2


def score_request_to_proto(
    batch: TokenBatch, fields: Sequence[str], weights: Mapping[str, float] | None = None
) -> reward_pb2.ScoreRequest:
    """Convert the arguments of a Score call."""
    message = reward_pb2.ScoreRequest(fields=fields, weights=weights or {}, updates=batch.updates)
    write_batch(message.batch, batch)
    return message


def score_request_from_proto(message: reward_pb2.ScoreRequest) -> tuple[TokenBatch, list[str], dict[str, float]]:
    """Return the sequences, the fields of their prompts, and the weights of an ensemble's parts. Raises InvalidRequest."""
    weights = dict(message.weights)
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise InvalidRequest(f"weights: {name!r} is {weight:g}, expected a finite number")
    return replace(batch_from_proto(message.batch), updates=message.updates), list(message.fields), weights


def scores_to_proto(scores: Scores) -> reward_pb2.ScoreResponse:
    """Convert scores."""
    return reward_pb2.ScoreResponse(
        scores=tensor_to_proto(scores.total),
        parts={name: tensor_to_proto(values) for name, values in scores.parts.items()},
        outcomes=[outcome_to_proto(outcome) for outcome in scores.outcomes],
        details=details_to_proto(scores.details),
        logged=[json.dumps(dict(values), sort_keys=True, allow_nan=False) for values in scores.logged],
        cured_faults=scores.cured_faults,
    )


def scores_from_proto(message: reward_pb2.ScoreResponse, sequences: int) -> Scores:
    """Convert and validate the scores of ``sequences`` sequences. Raises InvalidRequest.

    A NaN without the outcome of a failure is refused, and a number with one.
    """
    for name, values in (
        ("outcomes", message.outcomes),
        ("details", message.details),
        ("logged", message.logged),
    ):
        if values and len(values) != sequences:
            raise InvalidRequest(f"{name}: expected none, or {sequences} elements, got {len(values)}")
    try:
        return Scores(
            total=scores_or_nan_from_proto(message.scores, "scores", sequences),
            parts={
                name: scores_or_nan_from_proto(values, f"parts.{name}", sequences)
                for name, values in message.parts.items()
            },
            outcomes=tuple(
                outcome_from_proto(number, f"outcomes[{index}]") for index, number in enumerate(message.outcomes)
            ),
            details=details_from_proto(message.details),
            logged=tuple(_logged(text, f"logged[{index}]") for index, text in enumerate(message.logged)),
            cured_faults=dict(message.cured_faults),
        )
    except ComputationFailed as error:
        raise InvalidRequest(str(error)) from None


def _logged(text: str, name: str) -> dict[str, Any]:
    """Return what a source logged for a sequence. Raises InvalidRequest."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or (problem := problem_of(values)) is not None:
        reason = problem if isinstance(values, dict) else "not a JSON object"
        raise InvalidRequest(f"{name}: {reason}")
    return values


def values_request_to_proto(batch: TokenBatch) -> critic_pb2.ValuesRequest:
    """Convert the argument of a Values call."""
    message = critic_pb2.ValuesRequest()
    write_batch(message.batch, batch)
    return message


def values_request_from_proto(message: critic_pb2.ValuesRequest) -> TokenBatch:
    """Return the sequences. Raises InvalidRequest."""
    return batch_from_proto(message.batch)


def values_to_proto(values: FloatArray, policy_version: int) -> critic_pb2.ValuesResponse:
    """Convert values float32 [response tokens] and the version of the value model."""
    return critic_pb2.ValuesResponse(values=tensor_to_proto(values), policy_version=policy_version)


def values_from_proto(message: critic_pb2.ValuesResponse, response_tokens: int) -> tuple[FloatArray, int]:
    """Return values float32 [response tokens] and the version of the value model. Raises InvalidRequest."""
    return floats_from_proto(message.values, "values", response_tokens), message.policy_version


def actor_log_probs_to_proto(
    batch: TokenBatch, temperature: float, reference: bool
) -> actor_pb2.ActorServiceLogProbsRequest:
    """Convert the arguments of the actor's LogProbs call."""
    message = actor_pb2.ActorServiceLogProbsRequest(temperature=temperature, reference=reference)
    write_batch(message.batch, batch)
    return message


def actor_log_probs_from_proto(message: actor_pb2.ActorServiceLogProbsRequest) -> tuple[TokenBatch, float, bool]:
    """Return the sequences, the temperature, and whether the actor serves as the reference. Raises InvalidRequest."""
    return batch_from_proto(message.batch), positive(message.temperature, "temperature"), message.reference


def actor_log_probs_response_to_proto(
    log_probs: FloatArray, policy_version: int
) -> actor_pb2.ActorServiceLogProbsResponse:
    """Convert log-probs float32 [response tokens] and the policy version."""
    return actor_pb2.ActorServiceLogProbsResponse(log_probs=tensor_to_proto(log_probs), policy_version=policy_version)


def reference_log_probs_to_proto(
    batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None
) -> reference_pb2.ReferenceServiceLogProbsRequest:
    """Convert the arguments of the reference's LogProbs call."""
    message = reference_pb2.ReferenceServiceLogProbsRequest(temperature=temperature)
    write_batch(message.batch, batch)
    if version is not None:
        message.version.step, message.version.directory = version.step, version.directory
        message.version.digest = version.digest
    return message


def reference_log_probs_from_proto(
    message: reference_pb2.ReferenceServiceLogProbsRequest,
) -> tuple[TokenBatch, float, ReferenceVersion | None]:
    """Return the sequences, the temperature and the version, None for the initial model. Raises InvalidRequest."""
    version = None
    if message.HasField("version"):
        version = ReferenceVersion(message.version.step, message.version.directory, message.version.digest)
        if len(version.digest) != 32:
            raise InvalidRequest(f"version.digest of {len(version.digest)} bytes: expected 32")
    return batch_from_proto(message.batch), positive(message.temperature, "temperature"), version


def reference_log_probs_response_to_proto(
    log_probs: FloatArray, version_step: int = 0
) -> reference_pb2.ReferenceServiceLogProbsResponse:
    """Convert log-probs float32 [response tokens] and the step of the version that computed them."""
    return reference_pb2.ReferenceServiceLogProbsResponse(
        log_probs=tensor_to_proto(log_probs), version_step=version_step
    )


def log_probs_from_proto(
    message: actor_pb2.ActorServiceLogProbsResponse | reference_pb2.ReferenceServiceLogProbsResponse,
    response_tokens: int,
) -> FloatArray:
    """Return log-probs float32 [response tokens], of actor or reference. Raises InvalidRequest."""
    return floats_from_proto(message.log_probs, "log_probs", response_tokens)
