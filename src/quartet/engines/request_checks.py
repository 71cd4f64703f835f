"""Checks of generation requests and engine responses, shared by all engines. An empty response is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quartet.config.rollout import MAX_ADDITIVE_PENALTY, MAX_REPETITION_PENALTY
from quartet.contract.generation import GenerationRequest, Penalties, SamplingParameters
from quartet.contract.trajectory import FinishReason, Trajectory
from quartet.engines.engine import EngineResponse, ServedModel
from quartet.engines.stop_strings import StopStrings, cut
from quartet.errors import ComputationFailed, InvalidRequest

MIN_LOG_PROB = -1e4
"""A log-prob below this is invalid: no sampled token has so low a probability."""


def check_sampling(sampling: SamplingParameters) -> None:
    """Raise InvalidRequest for parameters outside their ranges."""
    if sampling.max_response_tokens < 1:
        raise InvalidRequest(f"max_response_tokens {sampling.max_response_tokens}: expected at least 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidRequest(f"temperature {sampling.temperature}: expected 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p {sampling.top_p}: expected more than 0, at most 1 (off)")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k {sampling.top_k}: expected 0 (off) or more")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest(f"min_p {sampling.min_p}: expected 0 (off) to 1")
    if sampling.penalties is not None:
        check_penalties(sampling.penalties)


def check_penalties(penalties: Penalties) -> None:
    """Raise InvalidRequest for penalties outside their ranges."""
    if not 0 < penalties.repetition <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition penalty {penalties.repetition}: expected more than 0 and at most {MAX_REPETITION_PENALTY:g}"
        )
    for name, value in (("presence", penalties.presence), ("frequency", penalties.frequency)):
        if not -MAX_ADDITIVE_PENALTY <= value <= MAX_ADDITIVE_PENALTY:
            raise InvalidRequest(
                f"{name} penalty {value}: expected {-MAX_ADDITIVE_PENALTY:g} to {MAX_ADDITIVE_PENALTY:g}"
            )


def check_requests(
    model: ServedModel, requests: Sequence[GenerationRequest], sampling: SamplingParameters
) -> list[GenerationRequest]:
    """Return the requests ordered by id. Raises InvalidRequest if the model cannot serve them."""
    check_sampling(sampling)
    size = model.vocabulary_size
    for request in requests:
        prompt = request.prompt_ids
        if prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt of {request.id}: expected at least one token id in one dimension")
        if int(prompt.min()) < 0 or int(prompt.max()) >= size:
            raise InvalidRequest(f"prompt of {request.id}: a token id is outside the vocabulary 0..{size - 1}")
        tokens = len(prompt) + request.own_sampling(sampling).max_response_tokens
        if 0 < model.max_sequence_tokens < tokens:
            raise InvalidRequest(
                f"a sequence of {tokens} tokens: the model has positions for {model.max_sequence_tokens}; "
                "shorten the prompt or the response (data.max_prompt_tokens, rollout.max_response_tokens, --max-tokens)"
            )
    return sorted(requests, key=lambda request: request.id)


def check_response(
    response: EngineResponse,
    model: ServedModel,
    sampling: SamplingParameters,
    policy_version: int,
    engine: str,
    stop_strings: StopStrings | None = None,
) -> Trajectory:
    """Return a response as a trajectory, with log-probs float32 [0] if the engine reports none.

    Tokens after the one that completes a stop string are dropped, and so are their experts. ``engine`` names the engine in error
    messages. Raises ComputationFailed if the response is empty, ends neither with a stop token or stop string nor at the limit,
    or has invalid tokens, log-probs, spans or experts.
    """
    if response.log_probs is not None and len(response.log_probs) != len(response.token_ids):
        raise ComputationFailed(
            f"{engine}: response to {response.request.id}: {len(response.log_probs)} log-probs for "
            f"{len(response.token_ids)} tokens"
        )
    where, size = f"{engine}: response to {response.request.id}", model.vocabulary_size
    outside = (
        f"{where}: a token id is outside the vocabulary 0..{size - 1}; the engine must serve the model of actor.model"
    )
    try:
        response = cut(response, stop_strings)
    except OverflowError:  # An id of a server that no integer type of NumPy holds.
        raise ComputationFailed(outside) from None
    ids, limit = np.asarray(response.token_ids, np.int64), response.request.own_sampling(sampling).max_response_tokens
    if not 1 <= len(ids) <= limit:
        raise ComputationFailed(f"{where}: {len(ids)} tokens; expected 1 to {limit}")
    if ids.min() < 0 or ids.max() >= size:
        raise ComputationFailed(outside)
    stops = [] if sampling.ignore_eos else np.flatnonzero(np.isin(ids, list(model.stop_ids))).tolist()
    if stops and stops[0] != len(ids) - 1:
        raise ComputationFailed(f"{where}: continues after the stop token {ids[stops[0]]}")
    if not (stops or response.stopped) and len(ids) < limit:
        raise ComputationFailed(
            f"{where}: ends after {len(ids)} of {limit} tokens without a stop token; check the engine's own token limit"
        )
    log_probs = np.asarray([] if response.log_probs is None else response.log_probs, np.float32)
    # Engines that compute in half precision may round log-probs up to slightly above 0.
    if not ((log_probs > MIN_LOG_PROB) & (log_probs < 0.1)).all():
        raise ComputationFailed(f"{where}: log-probs that are not finite, too low, or positive")
    spans = [span.tokens for span in response.spans]
    if spans and (min(spans) < 1 or sum(spans) != len(ids)):
        raise ComputationFailed(f"{where}: versions of the weights for {sum(spans)} of {len(ids)} tokens")
    reason = FinishReason.EOS if stops or response.stopped else FinishReason.LENGTH
    prompt, experts = np.asarray(response.request.prompt_ids, np.int32), response.routed_experts
    if experts is not None:
        experts, inputs = np.ascontiguousarray(experts), len(prompt) + len(ids) - 1
        if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3 or len(experts) < inputs:
            raise ComputationFailed(
                f"{where}: routed experts of type {experts.dtype} and shape {experts.shape}; expected uint8 or uint16 "
                f"[{inputs}, layers, experts per token]"
            )
        # Those of tokens after a stop string are dropped.
        experts = experts[:inputs]
    trajectory = Trajectory.of_response(
        response.request.id, policy_version, prompt, ids.astype(np.int32), log_probs, reason
    )
    return trajectory if experts is None else replace(trajectory, routed_experts=experts)
