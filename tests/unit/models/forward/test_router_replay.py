"""Experts of the generation engine in the trainer's passes, compared with routers that are written down again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.trajectory import TokenBatch
from quartet.errors import ConfigError, InvalidRequest, MismatchError
from quartet.models.forward import batching
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.router_replay import replayed_routing, routers_of
from quartet.models.forward.scoring import response_log_probs
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.updates import update_policy
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny
from tests.unit.models.updates import (
    LOSS,
    PROMPTS,
    RESPONSES,
    ReferenceUpdate,
    experience,
    largest_difference,
    settings,
    sgd,
)

TOP_K = 2


def of_row(batch: TokenBatch, row: int) -> torch.Tensor:
    """Return the experts of a sequence, [tokens - 1, layers, k]."""
    assert batch.routed_experts is not None
    ends = np.cumsum(batch.lengths - 1)
    return torch.from_numpy(batch.routed_experts[ends[row] - batch.lengths[row] + 1 : ends[row]].astype(np.int64))


@contextmanager
def forced(model: Any, experts: torch.Tensor) -> Iterator[None]:
    """Replace the routers of a Mixtral or Qwen3-MoE by their formula, with these experts [tokens, layers, k] of one sequence."""
    gates = [layer.mlp.gate for layer in model.model.layers]

    def forward_of(gate: Any, layer: int) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = hidden.reshape(-1, gate.weight.shape[1]) @ gate.weight.T
            # The last token predicts nothing.
            chosen = torch.cat([experts[:, layer], experts[-1:, layer]])[: len(logits)]
            probabilities = torch.exp(logits - logits.logsumexp(-1, keepdim=True))
            weights = torch.stack([row[index] for row, index in zip(probabilities, chosen, strict=True)])
            if getattr(gate, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward

    for layer, gate in enumerate(gates):
        gate.forward = forward_of(gate, layer)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


class ForcedReferenceUpdate(ReferenceUpdate):
    """The reference implementation with the experts of the experience."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The default kernel takes no float64.
        self.model.set_experts_implementation("eager")

    def distribution(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        with forced(self.model, of_row(self.data.batch, row)):
            return super().distribution(row)


def plain_log_probs(model: Any, batch: TokenBatch) -> np.ndarray[Any, Any]:
    """Return the log-probs of each sequence alone, by ``forced`` experts, float32 [response tokens]."""
    results = []
    for row, sequence in enumerate(batch.sequences()):
        ids, prompt = torch.from_numpy(sequence.astype(np.int64)), int(batch.prompt_lengths[row])
        with torch.no_grad(), forced(model, of_row(batch, row)):
            every = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        results.append(every[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0].numpy())
    return np.concatenate(results)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_log_probs_are_those_of_the_given_experts(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed:
        monkeypatch.setattr("quartet.models.workers.shares.supports_packing", lambda model: False)
    model, batch = tiny.causal(kind), tiny.routed(tiny.batch([3, 1, 6, 4], [5, 8, 1, 6]))
    expected = plain_log_probs(model, batch)
    assert response_log_probs(model, batch, 1.0, 14) == pytest.approx(expected, abs=1e-5)
    own = response_log_probs(model, dataclasses.replace(batch, routed_experts=None), 1.0, 14)
    assert np.abs(own - expected).max() > 0.01


@pytest.mark.parametrize("kind", [*tiny.MIXTURES, "deepseek_v32"])
def test_the_routers_own_experts_change_no_bit(kind: str) -> None:
    model, batch = tiny.causal(kind), tiny.batch([3], [5])
    part = build_micro_batch(batch, [0], "cpu")
    with torch.no_grad(), routers_of(model).recording() as last:
        expected = model(input_ids=part.input_ids).logits
        chosen = last()
    assert chosen.shape == (7, 2, 2)
    own = dataclasses.replace(batch, routed_experts=chosen.numpy().astype(np.uint8))
    part = build_micro_batch(own, [0], "cpu")
    with torch.no_grad(), replayed_routing(model, part):
        assert torch.equal(model(input_ids=part.input_ids).logits, expected)


def test_equal_prompts_with_other_experts_are_computed_apart() -> None:
    model, batch = tiny.causal("qwen3_moe"), tiny.batch([5, 5], [3, 4])
    batch.token_ids[8:13] = batch.token_ids[:5]
    batch = tiny.routed(batch)
    assert batching.build_micro_batch(batch, [0, 1], "cpu", packed=True).input_ids.shape[1] == 15
    assert response_log_probs(model, batch, 1.0, 100) == pytest.approx(plain_log_probs(model, batch), abs=1e-5)
    assert batch.routed_experts is not None
    batch.routed_experts[7:12] = batch.routed_experts[:5]
    assert batching.build_micro_batch(batch, [0, 1], "cpu", packed=True).input_ids.shape[1] == 10
    assert response_log_probs(model, batch, 1.0, 100) == pytest.approx(plain_log_probs(model, batch), abs=1e-5)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_an_update_agrees_with_a_float64_reference_implementation(kind: str, recomputes: bool) -> None:
    model = tiny.causal(kind)
    data = experience(model)
    data = dataclasses.replace(data, batch=tiny.routed(data.batch))
    data = dataclasses.replace(data, log_probs=response_log_probs(model, data.batch, LOSS.temperature, 1000))
    reference = ForcedReferenceUpdate(model, data, settings())
    expected = reference.policy()
    learned = copy.deepcopy(model)
    with activation_checkpointing(learned, recomputes):
        result = update_policy(learned, sgd(learned), data, settings(), LOSS, 40)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert largest_difference(learned, reference.model) < 1e-5
    assert result["rollout_mismatch_kl"] < 1e-9
    # The gradients reach the routers.
    before, after = (each.model.layers[0].mlp.gate.weight for each in (model, learned))
    assert (before - after).abs().max() > 1e-4
    without = copy.deepcopy(model)
    own = dataclasses.replace(data, batch=dataclasses.replace(data.batch, routed_experts=None))
    assert update_policy(without, sgd(without), own, settings(), LOSS, 40)["rollout_mismatch_kl"] > 1e-3
    assert largest_difference(without, learned) > 1e-3


def test_an_adapter_is_trained_with_the_given_experts() -> None:
    model = tiny.causal("qwen3_moe")
    add_adapter(model, "base", LoraConfig(rank=2), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    data = experience(model)
    batch = tiny.routed(data.batch)
    expected = plain_log_probs(model, batch)
    assert response_log_probs(model, batch, 1.0, 100) == pytest.approx(expected, abs=1e-5)
    data = dataclasses.replace(data, batch=batch, log_probs=response_log_probs(model, batch, LOSS.temperature, 100))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    result = update_policy(model, torch.optim.SGD(trained, lr=0.0), data, settings(), LOSS, 40)
    assert result["rollout_mismatch_kl"] < 1e-9
    assert result["grad_norm"] > 0


def test_an_error_leaves_the_routers_as_they_were() -> None:
    model, batch = tiny.causal("qwen3_moe"), tiny.routed(tiny.batch([3], [5]))
    part = build_micro_batch(batch, [0], "cpu")
    with pytest.raises(ZeroDivisionError), replayed_routing(model, part):
        raise ZeroDivisionError
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.router_replay: no module of the model returns the experts .* false"
    ):
        routers_of(tiny.causal("llama"))


def test_a_router_whose_choice_has_no_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("qwen3_moe")
    for layer in model.model.layers:
        monkeypatch.setattr(layer.mlp.experts, "forward", lambda hidden, chosen, weights: hidden)
    with pytest.raises(ConfigError, match="does not use the experts that are given to its 2 routers"):
        routers_of(model)


def test_experts_that_the_model_cannot_have_chosen_are_refused() -> None:
    model, batch = tiny.causal("qwen3_moe"), tiny.routed(tiny.batch([3, 2], [5, 4]))
    experts = batch.routed_experts
    assert experts is not None
    unknown, twice = experts.copy(), experts.copy()
    unknown[5, 1, 0], twice[5, 1] = 4, [2, 2]
    for wrong, message in (
        (experts[:, :1], "2 experts per token in 1 layers, the policy has 2 in 2"),
        (unknown, r"expert 4, the policy has 0\.\.3"),
        (twice, "the same expert twice"),
    ):
        with pytest.raises(MismatchError, match=message):
            response_log_probs(model, dataclasses.replace(batch, routed_experts=wrong), 1.0, 100)
    with pytest.raises(InvalidRequest, match=r"routed_experts .*: expected \[12, layers"):
        dataclasses.replace(batch, routed_experts=experts[:-1])


def test_uneven_lengths_keep_their_own_experts() -> None:
    batch = tiny.routed(tiny.batch(PROMPTS, RESPONSES))
    part = build_micro_batch(batch, [4, 1], "cpu")
    assert part.routed_experts is not None
    experts = part.routed_experts.view(2, -1, 2, TOP_K)
    assert torch.equal(experts[0, : PROMPTS[4] + RESPONSES[4] - 1].long(), of_row(batch, 4))
    assert torch.equal(experts[1, : PROMPTS[1] + RESPONSES[1] - 1].long(), of_row(batch, 1))
    # Pads get different experts, too: kernels may rely on it.
    assert experts[0, -1].tolist() == [[0, 1], [0, 1]]
