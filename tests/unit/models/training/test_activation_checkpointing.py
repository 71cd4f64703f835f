"""Activation checkpointing: bit-identical updates, fewer saved bytes, and no effect after its context."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.models.forward.packing import supports_packing
from quartet.models.training.activation_checkpointing import activation_checkpointing, count_checkpointed_layers
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.update_memory import saved_bytes
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates

PACKED = {"llama": True, "gpt2": True, "gpt_neox": True, "qwen2": True, "mistral": False, "bloom": False}


def update(model: Any, recomputes: bool) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Return metrics and weights after an update with several mini-batches and micro-batches."""
    learned, settings = copy.deepcopy(model), updates.settings(num_epochs=1)
    optimizer = create_optimizer(learned, 0.05)
    with activation_checkpointing(learned, recomputes):
        if isinstance(learned, ValueModel):
            experience = updates.experience(None)
            result = update_value(learned, optimizer, experience, settings, ValueLossSettings(), 20)
        else:
            result = update_policy(learned, optimizer, updates.experience(learned), settings, updates.LOSS, 20)
    return result, [parameter.detach() for parameter in learned.parameters()]


@pytest.mark.parametrize(
    ("kind", "trained", "lora"),
    [
        *((kind, "policy", False) for kind in (*PACKED, "qwen3_5_text", "zamba2")),
        ("llama", "value", False),
        ("gpt2", "policy", True),
        ("bloom", "value", True),
    ],
)
def test_an_update_with_checkpointing_is_bit_identical(kind: str, trained: str, lora: bool) -> None:
    policy = tiny.causal(kind, seed=1)
    model = policy if trained == "policy" else ValueModel.of_causal_lm(policy)
    if lora:
        add_adapter(policy if trained == "policy" else policy.base_model, "base", LoraConfig(rank=2, alpha=4.0))
    assert supports_packing(model) is PACKED.get(kind, False)
    (expected, weights), (recomputed, same) = update(model, False), update(model, True)
    assert recomputed == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    before = [parameter.detach() for parameter in model.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(weights, before, strict=True))


@pytest.mark.parametrize(("kind", "lora"), [*((kind, False) for kind in PACKED), ("llama", True)])
def test_checkpointing_saves_fewer_bytes(kind: str, lora: bool) -> None:
    model = tiny.causal(kind, num_hidden_layers=4)
    if lora:
        add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
    ids = torch.arange(40)[None] % tiny.VOCABULARY

    def forward() -> Any:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    expected = saved_bytes(model, forward)
    with activation_checkpointing(model):
        recomputed = saved_bytes(model, forward)
    assert recomputed < 0.5 * expected
    # The input of each layer is still saved.
    assert recomputed >= count_checkpointed_layers(model) * ids.numel() * 32 * 4


def test_checkpointing_is_off_after_an_error() -> None:
    model = tiny.causal("llama")

    def fail() -> None:
        with activation_checkpointing(model):
            assert model.is_activation_checkpointing
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not model.is_activation_checkpointing
    assert not any(module.training for module in model.modules())


def test_dropout_in_the_model_config_stays_off(tmp_path: Path) -> None:
    config = FalconConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        hidden_dropout=0.5,
        attention_dropout=0.5,
    )
    FalconForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    plain, recomputed = update(model, False), update(model, True)
    assert plain[0] == recomputed[0]
    assert all(map(torch.equal, plain[1], recomputed[1]))
    assert model.config.hidden_dropout == 0.5, "the saved config must keep the original dropout"
