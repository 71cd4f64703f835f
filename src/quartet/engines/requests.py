"""Checks of generation requests, shared by the engines that hold their own weights."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.engines.engine import ServedModel
from quartet.errors import InvalidRequest
from quartet.types import GenerationRequest, SamplingParameters


def check_requests(
    requests: Sequence[GenerationRequest], sampling: SamplingParameters, served_model: ServedModel
) -> None:
    """Raise InvalidRequest if the sampling is out of range, or the model cannot serve one of the requests."""
    if sampling.max_response_tokens < 1:
        raise InvalidRequest(f"max_response_tokens {sampling.max_response_tokens}: expected at least 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidRequest(f"temperature {sampling.temperature}: expected 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p {sampling.top_p}: expected more than 0, at most 1 (off)")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k {sampling.top_k}: expected 0 (off) or more")
    size, limit = served_model.vocabulary_size, served_model.max_sequence_tokens
    for request in requests:
        prompt = request.prompt_ids
        if prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt of {request.id}: expected at least one token id in one dimension")
        if int(prompt.min()) < 0 or int(prompt.max()) >= size:
            raise InvalidRequest(f"prompt of {request.id}: a token id is outside the vocabulary 0..{size - 1}")
        longest = len(prompt) + sampling.max_response_tokens
        if limit and longest > limit:
            raise InvalidRequest(
                f"a sequence of {longest} tokens: the model has positions for {limit}; "
                "shorten the prompt or the response (data.max_prompt_tokens, rollout.max_response_tokens, --max-tokens)"
            )
