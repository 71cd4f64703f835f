"""Float32 master weights of half-precision parameters: steps, the rounded parameters, and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.errors import ModelError
from quartet.models.training.optimizer import MasterWeightAdamW, apply_gradients, create_optimizer, load_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.weights.loading import freeze_parameters, load_causal_lm, load_critic
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates
from tests.unit.models.saving import save_optimizer, save_policy

HALF = [torch.bfloat16, torch.float16]


def half_precision_model(kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny.causal(kind, initializer_range=0.1).to(dtype)


def learn(model: Any, optimizer: torch.optim.Optimizer, seed: int = 0, rate: float = 1e-3) -> dict[str, float]:
    data = updates.experience(model, seed)
    return update_policy(model, optimizer, data, updates.settings(learning_rate=rate), updates.LOSS, 40)


def stepped_weights(optimizer: MasterWeightAdamW) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in optimizer.stepped_parameters()]).double()


def plain_adamw(parameters: list[Any], decay: float) -> torch.optim.AdamW:
    matrices, rest = ([p for p in parameters if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def test_float32_training_is_bit_identical_to_plain_adamw_without_copies(tmp_path: Path) -> None:
    ours, theirs = tiny.causal("llama"), tiny.causal("llama")
    optimizer, plain = create_optimizer(ours, 0.1, weight_decay=0.1), plain_adamw(list(theirs.parameters()), 0.1)
    for seed in range(3):
        assert learn(ours, optimizer, seed) == learn(theirs, plain, seed)
    assert updates.largest_difference(ours, theirs) == 0
    assert not optimizer.parameter_of_master_weight
    assert {id(weight) for weight in optimizer.stepped_parameters()} == {id(p) for p in ours.parameters()}
    save_optimizer(optimizer, tmp_path / "o")
    names = {name.partition(".")[2] for name in safetensors.torch.load_file(tmp_path / "o")}
    assert names == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", HALF)
def test_a_step_clips_and_updates_float32_copies_and_then_rounds(dtype: torch.dtype) -> None:
    model = half_precision_model(dtype=dtype)
    optimizer = create_optimizer(model, 1e-3, weight_decay=0.1)
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    plain = plain_adamw(copies, 0.1)
    plain.param_groups[0]["lr"] = plain.param_groups[1]["lr"] = 1e-3
    addresses = [p.data_ptr() for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter, float_copy in zip(model.parameters(), copies, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            float_copy.grad = parameter.grad.float()
        expected = float(torch.nn.utils.clip_grad_norm_([p for g in plain.param_groups for p in g["params"]], 0.5))
        plain.step()
        assert apply_gradients(optimizer, [torch.zeros(())], 0.5, "policy") == expected
        for parameter, float_copy in zip(model.parameters(), copies, strict=True):
            assert torch.equal(parameter, float_copy.to(dtype))
            assert parameter.grad is None
    master_weights = {id(parameter): weight for weight, parameter in optimizer.parameter_of_master_weight.items()}
    for parameter, float_copy in zip(model.parameters(), copies, strict=True):
        assert torch.equal(master_weights[id(parameter)], float_copy)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {torch.float32}


def test_small_updates_accumulate_in_the_master_weights_until_the_parameters_change() -> None:
    half = half_precision_model("llama")
    moves = []
    for model in (copy.deepcopy(half).float(), half):
        optimizer = create_optimizer(model, 1e-6)
        before = stepped_weights(optimizer)
        data, optimization = (
            updates.experience(model),
            updates.settings(num_epochs=1, num_mini_batches=1, learning_rate=1e-6),
        )
        update_policy(model, optimizer, data, optimization, updates.LOSS, 1000)
        moves.append(stepped_weights(optimizer) - before)
    assert torch.cosine_similarity(*moves, dim=0) > 0.9
    assert (moves[1] != 0).double().mean() > 0.9
    weights = [p.detach().clone() for p in half.parameters()]
    for seed in range(20):
        learn(half, optimizer, seed, 1e-5)
    changed = [float((p != old).double().mean()) for p, old in zip(half.parameters(), weights, strict=True)]
    assert np.mean(changed) > 0.05
    assert all(
        torch.equal(parameter, weight.bfloat16()) for weight, parameter in optimizer.parameter_of_master_weight.items()
    )


def test_frozen_parameters_have_no_master_weight_and_do_not_change() -> None:
    model = half_precision_model()
    freeze_parameters(model, ["*embed_tokens*", "*.layers.0.*"])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = create_optimizer(model, 0.1, weight_decay=0.1)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in optimizer.parameter_of_master_weight.values()} == trained
    learn(model, optimizer)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old) is (id(parameter) not in trained)


def test_adapters_and_value_heads_are_float32_and_have_no_copy(tmp_path: Path) -> None:
    model = half_precision_model()
    add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
    assert not create_optimizer(model, 0.1).parameter_of_master_weight
    critic = load_critic(tiny.saved(tiny.classifier("llama"), tmp_path / "m"), dtype="bfloat16")
    optimizer = create_optimizer(critic, 0.1)
    assert {id(p) for p in optimizer.parameter_of_master_weight.values()} == {
        id(p) for p in critic.backbone.parameters()
    }
    head = critic.head.weight.detach().clone()
    data = updates.experience(None)
    update_value(critic, optimizer, data, updates.settings(), ValueLossSettings(), 40)
    assert not torch.equal(critic.head.weight, head)


def test_an_update_that_ends_early_leaves_no_gradients() -> None:
    model = half_precision_model()
    optimizer = create_optimizer(model, 0.1)
    loss = dataclasses.replace(updates.LOSS, target_kl=1e-9)
    optimization = updates.settings(num_epochs=3)
    assert update_policy(model, optimizer, updates.experience(model), optimization, loss, 40)["optimizer_steps"] == 1
    assert all(p.grad is None for p in [*model.parameters(), *optimizer.stepped_parameters()])


def saved(folder: Path, dtype: str = "bfloat16") -> tuple[Any, MasterWeightAdamW]:
    """Train a policy, and save it and its optimizer to ``folder``."""
    model = load_causal_lm(tiny.saved(tiny.causal("llama"), folder / "start"), dtype)
    optimizer = create_optimizer(model, 1e-3, weight_decay=0.1)
    learn(model, optimizer)
    save_policy(model, None, folder / "policy")
    save_optimizer(optimizer, folder / "optimizer")
    return model, optimizer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_from_saved_master_weights_is_bit_identical(dtype: str, tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, dtype)
    stored = safetensors.torch.load_file(tmp_path / "policy" / "model.safetensors")
    assert {str(value.dtype) for value in stored.values()} == {f"torch.{dtype}"}
    resumed = load_causal_lm(tmp_path / "policy", dtype)
    other = create_optimizer(resumed, 0.0, weight_decay=0.1)
    assert not torch.equal(stepped_weights(other), stepped_weights(optimizer))
    load_optimizer(other, tmp_path / "optimizer")
    assert torch.equal(stepped_weights(other), stepped_weights(optimizer))
    for seed in range(3):
        assert learn(resumed, other, seed) == learn(model, optimizer, seed)
    assert torch.equal(stepped_weights(other), stepped_weights(optimizer))
    assert updates.largest_difference(model, resumed) == 0


def remove_master_weights(path: Path, drop: Any = lambda name: True) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {n: file.get_tensor(n) for n in file.keys() if not (n.endswith(".master") and drop(n))}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def test_master_weights_of_another_checkpoint_are_refused_without_a_change(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "optimizer"
    full = load_causal_lm(tmp_path / "policy", "float32")
    with pytest.raises(ModelError, match=rf"{path}: has float32 master weights of \d+ parameters, the model 0 "):
        load_optimizer(create_optimizer(full, 0.1), path)
    for start in (tmp_path / "start", tmp_path / "policy"):
        # A policy of another checkpoint, and one of another dtype.
        dtype = "bfloat16" if start.name == "start" else "float16"
        optimizer = create_optimizer(load_causal_lm(start, dtype), 0.1)
        before = stepped_weights(optimizer)
        with pytest.raises(ModelError, match=rf"{path}: the master weight of parameter \d+, .* does not round to"):
            load_optimizer(optimizer, path)
        assert torch.equal(stepped_weights(optimizer), before)
    half = create_optimizer(load_causal_lm(tmp_path / "policy", "bfloat16"), 0.1)
    for missing in (lambda name: name == "3.master", lambda name: True):
        remove_master_weights(path, missing)
        with pytest.raises(ModelError, match=rf"{path}: has float32 master weights of \d+ parameters"):
            load_optimizer(half, path)
