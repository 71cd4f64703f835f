"""Experts that the torch engine reports, compared with those of forward passes over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.engines.engine import EngineResponse
from quartet.engines.request_checks import check_response
from quartet.engines.stop_strings import StopStrings
from quartet.errors import ComputationFailed, ConfigError
from quartet.models.forward.router_replay import routers_of
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine, served_model
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS, 7, 9})


def whole_sequence(model: Any, trajectory: Trajectory) -> np.ndarray[Any, Any]:
    """Return the experts of a forward pass over all tokens but the last one, [tokens - 1, layers, k]."""
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])[:-1].astype(np.int64)
    with torch.no_grad(), routers_of(model).recording() as last:
        model(input_ids=torch.from_numpy(ids)[None])
        return last().numpy()


@pytest.mark.parametrize(("kind", "slots"), [("qwen3_moe", 4), ("mixtral", 32), ("deepseek_v32", 5), ("gpt_oss", 3)])
def test_the_reported_experts_are_those_of_a_pass_over_the_whole_sequence(kind: str, slots: int) -> None:
    """With fewer slots than requests, the others wait, and finished rows make way for them."""
    model, requests = tiny.causal(kind), tiny.requests(12)
    result = tiny.generated(TorchEngine(model, STOPS, slots, routed_experts=True), requests, seed=4)
    assert len({len(trajectory.response_ids) for trajectory in result}) > 1
    for trajectory in result:
        assert trajectory.routed_experts is not None
        assert trajectory.routed_experts.dtype == np.uint8
        assert np.array_equal(trajectory.routed_experts, whole_sequence(model, trajectory))
    log_probs = response_log_probs(model, TokenBatch.of_policy(result), 1.0, 256)
    assert np.allclose(np.concatenate([item.log_probs for item in result]), log_probs, atol=1e-4)


def test_an_engine_without_the_setting_reports_none() -> None:
    result = tiny.generated(TorchEngine(tiny.causal("qwen3_moe"), STOPS, 4), tiny.requests(2))
    assert [trajectory.routed_experts for trajectory in result] == [None, None]


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.router_replay"):
        TorchEngine(tiny.causal("llama"), STOPS, 4, routed_experts=True)


def test_tokens_after_a_stop_string_lose_their_experts() -> None:
    model, (request,) = tiny.causal("qwen3_moe"), tiny.requests(1)
    prompt = len(request.prompt_ids)
    experts = np.arange((prompt + 3) * 4, dtype=np.uint8).reshape(prompt + 3, 2, 2)
    response = EngineResponse(request, [2, 3, 4, 5], [-1.0] * 4, routed_experts=experts)
    stops = StopStrings(("w3",), tiny.tokenizer().decode, tiny.VOCABULARY)
    served, sampling = served_model(model), SamplingParameters(4)
    result = check_response(response, served, sampling, 0, "x", stops)
    assert result.response_ids.tolist() == [2, 3]
    assert result.routed_experts is not None
    assert np.array_equal(result.routed_experts, experts[: prompt + 1])
    for wrong in (experts[:-1], experts.astype(np.int32), experts[:, 0]):
        with pytest.raises(ComputationFailed, match=r"routed experts of type .*; expected uint8 or uint16 \["):
            check_response(replace(response, routed_experts=wrong), served, sampling, 0, "x")
