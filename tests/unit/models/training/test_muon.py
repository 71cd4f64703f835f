"""Muon: the steps of torch's Muon and AdamW, float32 master weights, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.models import LoraConfig, OptimizerConfig
from quartet.errors import ModelError
from quartet.models.training.optimizer import MasterWeightMuon, create_optimizer, load_optimizer, set_learning_rate
from quartet.models.training.updates import update_policy
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import freeze_parameters
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates
from tests.unit.models.adapters import IDS, same, snapshot
from tests.unit.models.saving import save_optimizer

RATE, DECAY, MOMENTUM = 1e-2, 0.1, 0.9
CONFIG = OptimizerConfig(kind="muon", momentum=MOMENTUM)


def muon(model: Any, **changes: Any) -> Any:
    return create_optimizer(model, RATE, weight_decay=DECAY, **{"config": CONFIG, **changes})


def learn(model: Any, optimizer: Any, seed: int = 0) -> None:
    data = updates.experience(model, seed)
    update_policy(model, optimizer, data, updates.settings(learning_rate=RATE), updates.LOSS, 40)


def stepped_by_muon(model: Any, optimizer: Any) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups if group.get("kind") == "muon"]
    return {names[id(parameter)] for group in groups for parameter in group}


def test_steps_are_those_of_torch_s_muon_and_adamw() -> None:
    ours, theirs = tiny.causal("llama"), tiny.causal("llama")
    optimizer = muon(ours)
    hidden = {name for name, parameter in theirs.named_parameters() if ".layers." in name and parameter.ndim == 2}
    assert stepped_by_muon(ours, optimizer) == hidden
    named = dict(theirs.named_parameters())
    others = [named[name] for name in named if name not in hidden]
    peers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [named[name] for name in named if name in hidden],
            lr=RATE,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [p for p in others if p.ndim > 1], "weight_decay": DECAY},
                {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=RATE,
            fused=True,
        ),
    ]
    for number in range(3):
        for each in (optimizer, *peers):
            set_learning_rate(each, RATE / (1 + number))
        for model, steppers in ((ours, [optimizer]), (theirs, peers)):
            model(IDS + number).logits.square().mean().backward()
            for each in steppers:
                each.step()
                each.zero_grad()
    assert same(snapshot(ours), snapshot(theirs))


def test_it_has_an_effect_in_updates() -> None:
    ours, theirs = tiny.causal("llama"), tiny.causal("llama")
    learn(ours, muon(ours)), learn(theirs, muon(theirs, config=None))
    changed = {name for name, value in snapshot(ours).items() if not torch.equal(value, snapshot(theirs)[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    other = tiny.causal("llama")
    learn(other, muon(other, config=OptimizerConfig(kind="muon", momentum=0.0)))
    assert not same(snapshot(ours), snapshot(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, learning_rate_ratio=4.0)], ids=["full", "lora"])
def test_training_from_a_checkpoint_is_bit_identical(
    dtype: torch.dtype, lora: LoraConfig | None, tmp_path: Path
) -> None:
    def build() -> tuple[Any, Any]:
        model = tiny.causal("llama").to(dtype)
        if lora:
            add_adapter(model, "base", lora)
        return model, muon(model, lora_ratio=lora.learning_rate_ratio if lora else 1.0)

    (model, optimizer), (restored, second) = build(), build()
    for seed in range(2):
        learn(model, optimizer, seed)
    save_optimizer(optimizer, tmp_path / "o")
    restored.load_state_dict(model.state_dict())
    load_optimizer(second, tmp_path / "o")
    learn(model, optimizer, 2), learn(restored, second, 2)
    assert same(snapshot(model), snapshot(restored))
    if dtype is torch.bfloat16 and lora is None:
        assert len(second.parameter_of_master_weight) == len(list(model.parameters()))
        for master, parameter in second.parameter_of_master_weight.items():
            assert torch.equal(master.to(dtype), parameter)
            assert not torch.equal(master, parameter.float())
    # Without the state the next update is another one.
    third, fresh = build()
    third.load_state_dict(model.state_dict())
    if dtype is torch.float32:
        learn(model, optimizer, 3), learn(third, fresh, 3)
        assert not same(snapshot(model), snapshot(third))


def test_a_state_of_adamw_is_refused(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    optimizer = muon(model, config=None)
    learn(model, optimizer)
    save_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ModelError, match=r"is of optimizer\.kind adamw, and the config has muon"):
        load_optimizer(muon(model), tmp_path / "o")


def test_heads_embeddings_and_experts_are_stepped_by_adamw() -> None:
    value = ValueModel.of_causal_lm(tiny.causal("mixtral"))
    names = stepped_by_muon(value, muon(value))
    assert names
    assert not any("embed" in name or "head" in name or "experts" in name for name in names)
    assert isinstance(muon(value), MasterWeightMuon)


def test_a_model_without_trained_matrices_in_layers_is_refused() -> None:
    model = tiny.causal("llama")
    freeze_parameters(model, ["*.layers.*"])
    with pytest.raises(ModelError, match=r"optimizer\.kind muon: no trained matrix is in a transformer layer"):
        muon(model)
