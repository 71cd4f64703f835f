"""Memory estimates of updates, compared with measurements of larger passes and with formulas."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.trajectory import TokenBatch
from quartet.errors import ModelError
from quartet.model_files.memory import training_state
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import forward_values
from quartet.models.training import update_memory as memory
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.update_memory import (
    Activations,
    SavedActivations,
    UpdateMemory,
    free_gpu_bytes,
    measure_policy,
    measure_value,
    saved_bytes,
)
from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

KINDS = ("llama", "gpt2", "mistral", "bloom")
"""Two packed and two padded models. The last one saves a score for each pair of tokens."""


def test_saved_bytes_count_each_storage_once_and_no_parameters() -> None:
    layer = torch.nn.Linear(8, 8)
    data = torch.ones(5, 8)

    def forward() -> torch.Tensor:
        hidden = layer(data)
        return hidden * hidden.view(5, 8) + layer(data)

    # The input, which both matmuls save, and the hidden states, which share storage with their view.
    assert saved_bytes(layer, forward) == data.nbytes + 5 * 8 * 4


def micro_batch(model: Any, lengths: list[int]) -> Any:
    sizes = np.array(lengths, np.int32)
    token_ids = np.arange(sizes.sum() + len(sizes), dtype=np.int32) % tiny.VOCABULARY
    return build_micro_batch(
        TokenBatch(token_ids, np.ones_like(sizes), sizes), range(len(sizes)), "cpu", supports_packing(model)
    )


def largest_batch(model: Any) -> Any:
    """Return a batch of sequences of 60 tokens; for a packed model also shorter ones, which attention pads to 60 tokens."""
    return micro_batch(model, [60, *[36] * 3] * 11 if supports_packing(model) else [60] * 20)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_matches_the_saved_bytes_of_a_larger_policy_pass(kind: str, recomputes: bool) -> None:
    model = tiny.causal(kind)
    large, equal = largest_batch(model), micro_batch(model, [60] * 20)
    with activation_checkpointing(model, recomputes):
        result = memory.activations_saved_by(model, memory.policy_forward(model, "report", all_at_once=True), 60)
        saved, saved_of_equal = (
            saved_bytes(model, lambda batch=batch: forward_log_probs(model, batch, 1.0, "report"))
            for batch in (large, equal)
        )
    assert result.bytes(large.input_ids.numel(), 60) == pytest.approx(saved, rel=0.01)
    assert result.bytes(20 * 60, 60) >= saved_of_equal


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_matches_the_saved_bytes_of_a_larger_value_pass(kind: str) -> None:
    model = ValueModel.of_causal_lm(tiny.causal(kind))
    large = largest_batch(model)
    saved = saved_bytes(model, lambda: forward_values(model, large))
    assert measure_value(model, 60).plain.bytes(large.input_ids.numel(), 60) == pytest.approx(saved, rel=0.01)


def test_attention_scores_that_are_saved_count_per_pair_of_tokens() -> None:
    scores = measure_value(ValueModel.of_causal_lm(tiny.causal("bloom")), 60)
    none = measure_value(ValueModel.of_causal_lm(tiny.causal("llama")), 60)
    assert scores.plain.all_logits.pair >= 4 * 2 * 4  # heads, layers, bytes
    assert none.plain.all_logits.pair == 0


def test_gradients_and_moments_count_only_trained_parameters() -> None:
    model = tiny.causal("llama")
    assert measure_policy(model, 60, "report").state == 3 * sum(parameter.nbytes for parameter in model.parameters())
    adapter = add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
    learned = sum(a.nbytes + b.nbytes for _, a, b in adapter.matrices())
    assert measure_policy(model, 60, "report").state == 3 * learned


def test_the_state_of_half_precision_models_agrees_with_the_planner() -> None:
    model = tiny.causal("llama").bfloat16()
    weights = sum(parameter.numel() for parameter in model.parameters())
    state = training_state(weights, weights, 2)
    assert measure_policy(model, 60, "report").state == state.kept - state.parameters - state.master_weights


def test_chunked_logits_are_not_saved() -> None:
    result = measure_policy(tiny.causal("llama"), 60, "report").plain
    assert result.all_logits.token - result.chunked_logits.token >= 4 * tiny.VOCABULARY * 0.8
    few = Activations(result.all_logits, result.chunked_logits, rows=8, logits=result.logits)
    assert few.bytes(1000, 60) < result.bytes(1000, 60)
    assert few.bytes(8, 60) == result.bytes(8, 60)


def test_gradient_checkpointing_needs_less() -> None:
    result = measure_policy(tiny.causal("llama", num_hidden_layers=8), 60, "report")
    assert result.token_bytes(True) < 0.7 * result.token_bytes(False)


def test_measuring_changes_neither_model_nor_random_state() -> None:
    model = tiny.causal("llama")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure_policy(model, 60, "train")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training


@pytest.mark.parametrize("longest", [2, 3, 5, 40])
def test_short_sequences_can_be_measured(longest: int) -> None:
    assert measure_policy(tiny.causal("llama"), longest, "report").token_bytes(False) > 0


def memory_of(longest: int) -> UpdateMemory:
    """Return a memory of 8 bytes of state and 8 per token, or 2 per token with activation checkpointing."""
    plain, again = (
        Activations(SavedActivations(0, size, 0), SavedActivations(0, size, 0), 0, 0) for size in (8.0, 2.0)
    )
    return UpdateMemory(8, plain, again, longest)


@pytest.mark.parametrize(
    ("tokens", "longest", "expected"),
    [
        (10**6, 100, 4096),
        (4096, 100, 4096),
        (4095, 100, 2048),
        (300, 100, 256),
        (128, 100, 128),
        # The longest sequence fits, but the next power of two does not.
        (110, 100, 64),
        (99, 100, 0),
        (5000, 5000, 4096),
        (4999, 5000, 0),
        (0, 1, 0),
    ],
)
def test_the_token_limit_is_halved_until_it_fits(tokens: int, longest: int, expected: int) -> None:
    free = (8 + 8 * tokens) / memory.MEMORY_FRACTION + 0.1
    assert memory_of(longest).max_tokens_within(4096, free, False) == expected
    assert memory_of(longest).max_tokens_within(4096, (8 + 2 * tokens) / memory.MEMORY_FRACTION + 0.1, True) == expected


def test_unused_memory_of_the_allocator_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert free_gpu_bytes(torch.device("cuda", 0)) == 1200


def test_a_lack_of_memory_in_a_trial_raises_model_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 MiB")

    monkeypatch.setattr(memory, "forward_values", full)
    with pytest.raises(
        ModelError, match=r"out of memory in a trial .* on cpu: tried to allocate 2 MiB; free memory for this service"
    ):
        measure_value(ValueModel.of_causal_lm(tiny.causal("llama")), 60)
