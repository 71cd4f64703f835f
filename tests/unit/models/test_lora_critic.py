"""LoRA on a critic: adapter and head are trained, and a critic can start from other checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.errors import ModelError
from quartet.models.forward.scoring import response_values
from quartet.models.training.updates import update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import load_causal_lm, load_critic
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.tokenizer import load_tokenizer
from tests.unit.models import tiny
from tests.unit.models.adapters import (
    ALPHA,
    BATCH,
    RANK,
    RESPONSES,
    SETTINGS,
    adapted,
    edit,
    experience,
    files,
    learn,
    optimizer_of,
    same,
    snapshot,
    split,
)
from tests.unit.models.saving import save_adapter, save_critic, save_critic_adapter


def critic_base(kind: str, source: str, directory: Path) -> str:
    """Save a causal LM, a classifier or a critic, from which a critic can start. Return its path."""
    if source == "critic":
        save_critic(ValueModel.of_classifier(tiny.classifier(kind)), directory)
    else:
        tiny.saved(tiny.causal(kind) if source == "causal" else tiny.classifier(kind), directory)
    return str(directory)


@pytest.mark.parametrize(
    ("kind", "source"), [*((kind, "classifier") for kind in tiny.KINDS), ("llama", "causal"), ("gpt2", "critic")]
)
def test_a_critic_trains_adapter_and_head_and_both_saves_load_again(kind: str, source: str, tmp_path: Path) -> None:
    base = critic_base(kind, source, tmp_path / "base")
    critic = load_critic(base)
    before = response_values(critic, BATCH, 64)
    below = snapshot(critic.backbone)
    adapter = add_adapter(critic.backbone, base, LoraConfig(rank=RANK, alpha=ALPHA))
    assert response_values(critic, BATCH, 64).tobytes() == before.tobytes()
    head = critic.head.weight.detach().clone()
    optimizer = optimizer_of(critic)
    for step in (1, 2):
        update_value(critic, optimizer, experience(step), SETTINGS, ValueLossSettings(), 64)
    assert same(split(critic.backbone.state_dict())[0], below)
    assert not torch.equal(critic.head.weight, head)
    assert any(value.any() for name, value in critic.backbone.state_dict().items() if ".lora_B." in name)
    values = response_values(critic, BATCH, 64)

    save_critic_adapter(critic, tmp_path / "adapter", adapter, tiny.tokenizer())
    save_critic(critic, tmp_path / "merged", tiny.tokenizer(), adapter)
    assert response_values(critic, BATCH, 64).tobytes() == values.tobytes()
    assert {"adapter_config.json", "adapter_model.safetensors", "value_head.safetensors", "tokenizer.json"} <= files(
        tmp_path / "adapter"
    ).keys()
    assert not {"model.safetensors", "config.json"} & files(tmp_path / "adapter").keys()
    loaded, merged = load_critic(tmp_path / "adapter"), load_critic(tmp_path / "merged")
    assert same(loaded.state_dict(), merged.state_dict())
    np.testing.assert_allclose(response_values(loaded, BATCH, 64), values, atol=1e-5)
    assert np.abs(values - before).max() > 1e-3
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert load_tokenizer(tmp_path / "adapter")("w7").input_ids == [7]


def test_a_critic_from_the_adapter_of_a_policy_starts_at_zero(tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal("llama"), tmp_path / "base"))
    model, adapter = adapted("llama", base)
    learn(model)
    save_adapter(adapter, None, tmp_path / "adapter")
    critic = load_critic(tmp_path / "adapter")
    assert response_values(critic, BATCH, 64).tolist() == [0.0] * sum(RESPONSES)
    merged = load_causal_lm(tmp_path / "adapter")
    assert same(critic.backbone.state_dict(), merged.model.state_dict())


def test_a_critic_adapter_with_a_broken_base_or_head_is_refused(tmp_path: Path) -> None:
    base = critic_base("llama", "classifier", tmp_path / "base")
    critic = load_critic(base)
    save_critic_adapter(critic, tmp_path / "a", add_adapter(critic.backbone, base, LoraConfig(rank=RANK, alpha=ALPHA)))
    (tmp_path / "a" / "value_head.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="value head"):
        load_critic(tmp_path / "a")
    edit(tmp_path / "a", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"adapter .*a: its base model: model .*gone: no such directory"):
        load_critic(tmp_path / "a")
    edit(tmp_path / "a", base_model_name_or_path=str(tmp_path / "a"))
    with pytest.raises(ModelError, match="is its own base"):
        load_critic(tmp_path / "a")
