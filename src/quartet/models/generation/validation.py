"""Checks of requests and responses of the engines that share the policy model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.engines.engine import EngineResponse, ServedModel, TokenDecoder
from quartet.engines.validation import check_requests, check_response
from quartet.models.forward.model_capabilities import max_positions, vocabulary_size
from quartet.models.generation.engine import Policy


def served_model(model: Any, stop_ids: frozenset[int] = frozenset(), decode: TokenDecoder | None = None) -> ServedModel:
    """Return the description of a loaded model. ``decode`` as in ``ServedModel``."""
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return ServedModel(
        str(model.config.name_or_path), dtype, stop_ids, vocabulary_size(model), max_positions(model) or 0, decode
    )


def validate_requests(
    model: Any, requests: Sequence[GenerationRequest], sampling: SamplingParameters
) -> list[GenerationRequest]:
    """Return the requests ordered by id. Raises InvalidRequest if the model cannot serve them."""
    return check_requests(served_model(model), requests, sampling)


def trajectories(
    responses: Sequence[EngineResponse], policy: Policy, sampling: SamplingParameters, policy_version: int, engine: str
) -> list[Trajectory]:
    """Return the responses as trajectories. The policy computes the log-probs that the engine did not report.

    ``engine`` names the engine in error messages. Raises as ``check_response``.
    """
    served = served_model(policy.model, policy.stop_ids)
    results = [check_response(response, served, sampling, policy_version, engine) for response in responses]
    missing = [index for index, response in enumerate(responses) if response.log_probs is None]
    if missing:
        batch = TokenBatch.of([results[index] for index in missing])
        log_probs = policy.score(batch, sampling.temperature or 1.0)
        parts = np.split(log_probs, np.cumsum(batch.response_lengths)[:-1])
        for index, part in zip(missing, parts, strict=True):
            results[index] = results[index].with_log_probs(part)
    return results
