"""Checks of generation requests and engine responses, shared by all engines. An empty response is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quartet.errors import ComputationFailed, InvalidRequest
from quartet.models.forward.model_capabilities import check_lengths, vocabulary_size
from quartet.models.generation.engine import Policy
from quartet.models.generation.sampling import check_sampling
from quartet.types import FinishReason, GenerationRequest, SamplingParameters, TokenBatch, Trajectory

MIN_LOG_PROB = -1e4
"""A log-prob below this is invalid: no sampled token has so low a probability."""


def validate_requests(
    model: Any, requests: Sequence[GenerationRequest], sampling: SamplingParameters
) -> list[GenerationRequest]:
    """Return the requests ordered by id. Raises InvalidRequest if the model cannot serve them."""
    check_sampling(sampling)
    size = vocabulary_size(model)
    for request in requests:
        prompt = request.prompt_ids
        if prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt of {request.id}: expected at least one token id in one dimension")
        if int(prompt.min()) < 0 or int(prompt.max()) >= size:
            raise InvalidRequest(f"prompt of {request.id}: a token id is outside the vocabulary 0..{size - 1}")
        check_lengths(model, np.array([len(prompt) + sampling.max_response_tokens], np.int64))
    return sorted(requests, key=lambda request: request.id)


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """An engine's response to a request. ``log_probs`` is None if the engine reports none."""

    request: GenerationRequest
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None


def trajectories(
    responses: Sequence[EngineResponse], policy: Policy, sampling: SamplingParameters, policy_version: int, engine: str
) -> list[Trajectory]:
    """Return the responses as trajectories. The policy computes the log-probs that the engine did not report.

    ``engine`` names the engine in error messages. Raises ComputationFailed if a response is empty, ends neither with a stop
    token nor at the limit, or has invalid tokens or log-probs.
    """
    results = [_checked(response, policy, sampling, policy_version, engine) for response in responses]
    missing = [index for index, response in enumerate(responses) if response.log_probs is None]
    if missing:
        batch = TokenBatch.of([results[index] for index in missing])
        log_probs = policy.score(batch, sampling.temperature or 1.0)
        parts = np.split(log_probs, np.cumsum(batch.response_lengths)[:-1])
        for index, part in zip(missing, parts, strict=True):
            results[index] = replace(results[index], log_probs=part)
    return results


def _checked(
    response: EngineResponse, policy: Policy, sampling: SamplingParameters, policy_version: int, engine: str
) -> Trajectory:
    ids, limit = np.asarray(response.token_ids, np.int64), sampling.max_response_tokens
    where = f"{engine}: response to {response.request.id}"
    if not 1 <= len(ids) <= limit:
        raise ComputationFailed(f"{where}: {len(ids)} tokens; expected 1 to {limit}")
    size = vocabulary_size(policy.model)
    if ids.min() < 0 or ids.max() >= size:
        raise ComputationFailed(
            f"{where}: a token id is outside the vocabulary 0..{size - 1}; the engine must serve the model of actor.model"
        )
    stops = [] if sampling.ignore_eos else np.flatnonzero(np.isin(ids, list(policy.stop_ids))).tolist()
    if stops and stops[0] != len(ids) - 1:
        raise ComputationFailed(f"{where}: continues after the stop token {ids[stops[0]]}")
    if not stops and len(ids) < limit:
        raise ComputationFailed(
            f"{where}: ends after {len(ids)} of {limit} tokens without a stop token; check the engine's own token limit"
        )
    log_probs = np.asarray([0.0] * len(ids) if response.log_probs is None else response.log_probs, np.float32)
    if len(log_probs) != len(ids):
        raise ComputationFailed(f"{where}: {len(log_probs)} log-probs for {len(ids)} tokens")
    # Engines that compute in half precision may round log-probs up to slightly above 0.
    if not ((log_probs > MIN_LOG_PROB) & (log_probs < 0.1)).all():
        raise ComputationFailed(f"{where}: log-probs that are not finite, too low, or positive")
    reason = FinishReason.EOS if stops else FinishReason.LENGTH
    prompt = np.asarray(response.request.prompt_ids, np.int32)
    return Trajectory(response.request.id, policy_version, prompt, ids.astype(np.int32), log_probs, reason)
