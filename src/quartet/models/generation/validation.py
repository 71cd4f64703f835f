"""Checks of generation requests and of engine responses, the same for all engines. An empty response is an error."""

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
"""Less than any token has that was drawn."""


def validate_requests(
    model: Any, requests: Sequence[GenerationRequest], sampling: SamplingParameters
) -> list[GenerationRequest]:
    """The requests by id. Raises InvalidRequest for what the model cannot generate."""
    check_sampling(sampling)
    size = vocabulary_size(model)
    for request in requests:
        prompt = request.prompt_ids
        if prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt of {request.id}: expected at least one token id in one dimension")
        if int(prompt.min()) < 0 or int(prompt.max()) >= size:
            raise InvalidRequest(f"prompt of {request.id}: a token id outside the vocabulary 0..{size - 1}")
        check_lengths(model, np.array([len(prompt) + sampling.max_response_tokens], np.int64))
    return sorted(requests, key=lambda request: request.id)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine has generated for a request. ``log_probs`` None: it gives none."""

    request: GenerationRequest
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None


def trajectories(
    answers: Sequence[Answer], policy: Policy, sampling: SamplingParameters, policy_version: int, engine: str
) -> list[Trajectory]:
    """The answers as trajectories, with the policy's own log-probs where the engine gave none.

    Raises ComputationFailed for an answer that is empty, that ends neither with a stop token nor at the limit, or whose tokens or
    log-probs cannot be; ``engine`` names it.
    """
    results = [_checked(answer, policy, sampling, policy_version, engine) for answer in answers]
    lacking = [index for index, answer in enumerate(answers) if answer.log_probs is None]
    if lacking:
        batch = TokenBatch.of([results[index] for index in lacking])
        log_probs = policy.score(batch, sampling.temperature or 1.0)
        parts = np.split(log_probs, np.cumsum(batch.response_lengths)[:-1])
        for index, part in zip(lacking, parts, strict=True):
            results[index] = replace(results[index], log_probs=part)
    return results


def _checked(
    answer: Answer, policy: Policy, sampling: SamplingParameters, policy_version: int, engine: str
) -> Trajectory:
    ids, limit = np.asarray(answer.token_ids, np.int64), sampling.max_response_tokens
    where = f"{engine}: response to {answer.request.id}"
    if not 1 <= len(ids) <= limit:
        raise ComputationFailed(f"{where}: {len(ids)} tokens; expected 1 to {limit}")
    size = vocabulary_size(policy.model)
    if ids.min() < 0 or ids.max() >= size:
        raise ComputationFailed(
            f"{where}: a token id outside the vocabulary 0..{size - 1}; is it the same model as actor.model?"
        )
    stops = [] if sampling.ignore_eos else np.flatnonzero(np.isin(ids, list(policy.stop_ids))).tolist()
    if stops and stops[0] != len(ids) - 1:
        raise ComputationFailed(f"{where}: goes on after the stop token {ids[stops[0]]}")
    if not stops and len(ids) < limit:
        raise ComputationFailed(
            f"{where}: ends after {len(ids)} of {limit} tokens without a stop token; has the engine a lower limit of its own?"
        )
    log_probs = np.asarray([0.0] * len(ids) if answer.log_probs is None else answer.log_probs, np.float32)
    if len(log_probs) != len(ids):
        raise ComputationFailed(f"{where}: {len(log_probs)} log-probs for {len(ids)} tokens")
    # Rounded up to a little above 0 by engines that compute in half precision.
    if not ((log_probs > MIN_LOG_PROB) & (log_probs < 0.1)).all():
        raise ComputationFailed(f"{where}: log-probs that are none: not finite, or positive")
    reason = FinishReason.EOS if stops else FinishReason.LENGTH
    prompt = np.asarray(answer.request.prompt_ids, np.int32)
    return Trajectory(answer.request.id, policy_version, prompt, ids.astype(np.int32), log_probs, reason)
