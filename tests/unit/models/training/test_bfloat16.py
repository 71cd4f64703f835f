"""Policies in bfloat16 on the CPU: precision of sampling, log-probs and updates."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import TokenBatch
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.sampling import sample_tokens
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.lora import add_adapter
from quartet.ppo.kl import kl_estimate
from tests.unit.models import tiny, updates

STOPS = frozenset({tiny.EOS, 7, 9})
LOSS = updates.with_options(entropy_coefficient=0.0, kl_loss_coefficient=0.0)
MAX_DIFFERENCE = 0.15
"""Maximum change of a log-prob, in nats, if weights and activations have 8 bits of precision."""


def full_and_half(kind: str) -> tuple[Any, Any]:
    """Return a float32 and a bfloat16 model with the same weights, which bfloat16 can represent."""
    half = tiny.causal(kind, initializer_range=0.1).bfloat16()
    return copy.deepcopy(half).float(), half


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = torch.from_numpy(values).bfloat16().float().numpy()
    return result


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_log_probs_are_float32_and_close_to_those_of_float32_weights(kind: str) -> None:
    full, half = full_and_half(kind)
    result = tiny.generated(TorchEngine(half, STOPS, 8), tiny.requests(24), temperature=0.7)
    batch, drawn = TokenBatch.of(result), np.concatenate([trajectory.log_probs for trajectory in result])
    trained = response_log_probs(half, batch, 0.7, 256)
    exact = response_log_probs(full, batch, 0.7, 256)
    assert (drawn.dtype, trained.dtype) == (np.float32, np.float32)
    assert np.abs(drawn - exact).max() < MAX_DIFFERENCE
    assert np.abs(trained - exact).max() < MAX_DIFFERENCE
    # Logits have 8 bits of precision, log-probs have 24.
    assert np.any(rounded(drawn) != drawn)
    assert np.any(rounded(trained) != trained)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}])
def test_draws_from_bfloat16_and_equal_float32_logits_are_the_same(sampling: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(64, 500, generator=generator)).bfloat16()
    uniforms = torch.rand((64, 1), dtype=torch.float64, generator=generator)
    parameters = SamplingParameters(1, **sampling)
    for result, expected in zip(
        sample_tokens(logits, uniforms, parameters), sample_tokens(logits.float(), uniforms, parameters), strict=True
    ):
        assert torch.equal(result, expected)


def test_the_same_call_gives_the_same_bits() -> None:
    engine = TorchEngine(full_and_half("qwen2")[1], STOPS, 5)
    first, second = (tiny.generated(engine, tiny.requests(20)) for _ in range(2))
    assert [t.response_ids.tolist() for t in first] == [t.response_ids.tolist() for t in second]
    assert all(a.log_probs.tobytes() == b.log_probs.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_packing_is_supported(kind: str) -> None:
    assert supports_packing(full_and_half(kind)[1])


def test_an_update_is_close_to_that_of_float32_and_reproducible() -> None:
    full, half = full_and_half("llama")
    again = copy.deepcopy(half)
    data = updates.experience(full)
    optimization = updates.settings(num_epochs=1, num_mini_batches=1, learning_rate=0.01)
    metrics = [
        update_policy(model, create_optimizer(model, 0.01), data, optimization, LOSS, 1000)
        for model in (full, half, again)
    ]
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    # The old log-probs come from the same forward pass, so the ratio starts at 1.
    assert metrics[1]["approx_kl"] == metrics[1]["clip_fraction"] == 0
    for name in ("policy_loss", "entropy", "grad_norm", "rollout_mismatch_kl"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=0.05, abs=0.01), name
    before, total, wrong = dict(full_and_half("llama")[0].named_parameters()), 0, 0
    for name, parameter in half.named_parameters():
        moves = [(p.float() - before[name]).detach() for p in (dict(full.named_parameters())[name], parameter)]
        clear = moves[0].abs() > 0.005
        total, wrong = total + int(clear.sum()), wrong + int((moves[0].sign() != moves[1].sign())[clear].sum())
    assert total > 1000
    assert (
        wrong / total < 0.05
    )  # The first step of Adam is the gradient's sign, which rounding may change for gradients near 0.
    assert updates.largest_difference(half, again) == 0
    assert metrics[1] == metrics[2]


def test_an_adapter_learns_at_rates_below_the_resolution_of_bfloat16_weights() -> None:
    model = full_and_half("llama")[1]
    data = dataclasses.replace(updates.experience(model), actor_mask=np.ones(sum(updates.RESPONSES), np.float32))
    adapter = add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0), 0)
    trained = {name: p.detach().clone() for name, p in adapter.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    optimization = updates.settings(num_epochs=3, num_mini_batches=1, learning_rate=1e-6)
    update_policy(model, create_optimizer(model, 1e-6), data, optimization, LOSS, 1000)
    now = dict(adapter.model.named_parameters())
    moved = [float((now[name].detach() - before).abs().max()) for name, before in trained.items() if "lora_B" in name]
    assert all(1e-6 < move < 1e-5 for move in moved)


def test_rounding_biases_even_estimates_of_the_kl_and_not_k1() -> None:
    # The policy is its reference. The engine decodes token by token, and the reference scores whole sequences.
    model = tiny.causal("llama", initializer_range=0.1).bfloat16()
    result = tiny.generated(TorchEngine(model, STOPS, 8), tiny.requests(96))
    batch = TokenBatch.of(result)
    drawn = torch.from_numpy(np.concatenate([trajectory.log_probs for trajectory in result]))
    reference = torch.from_numpy(response_log_probs(model, batch, 1.0, 256))
    trainer = torch.from_numpy(response_log_probs(model, batch, 1.0, 256))
    k1, absolute, k2 = (kl_estimate(drawn, reference, kind).double() for kind in ("k1", "absolute", "k2"))
    error = float(k1.std() / len(k1) ** 0.5)
    assert abs(float(k1.mean())) < 3 * error, "k1 is unbiased"
    assert float(absolute.mean()) > 10 * error, "|d| counts each rounding error as KL"
    assert float(k2.mean()) > 3 * float(k2.std() / len(k2) ** 0.5)
    # The trainer scores as the reference does.
    assert kl_estimate(trainer, reference, "absolute").tolist() == [0.0] * len(k1)


def test_rounding_biases_the_absolute_kl_of_models_that_differ_slightly() -> None:
    # The trainer scores the responses as the reference does, and still rounds in another way.
    reference = tiny.causal("llama", initializer_range=0.1).bfloat16()
    policy = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in policy.parameters():
            noise = 1e-4 * weights.float().std() * torch.randn(weights.shape, generator=generator)
            weights.copy_(weights.float() + noise)
    assert updates.largest_difference(policy, reference) > 0
    batch = TokenBatch.of(tiny.generated(TorchEngine(policy, STOPS, 8), tiny.requests(96)))

    def estimates(dtype: torch.dtype) -> list[float]:
        scored = [response_log_probs(copy.deepcopy(model).to(dtype), batch, 1.0, 256) for model in (policy, reference)]
        difference = torch.from_numpy(scored[0] - scored[1]).double()
        return [float(difference.mean()), float(difference.abs().mean())]

    (k1, absolute), (exact_k1, exact_absolute) = estimates(torch.bfloat16), estimates(torch.float32)
    assert absolute > 5 * exact_absolute
    assert abs(k1 - exact_k1) < 0.2 * absolute
