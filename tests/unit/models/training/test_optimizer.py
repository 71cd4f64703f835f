"""AdamW: weight decay, and saving and loading of its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quartet.contract.update import ValueLossSettings
from quartet.errors import ModelError
from quartet.models.training.optimizer import create_optimizer, load_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import load_critic
from tests.unit.models import tiny
from tests.unit.models.saving import save_critic, save_optimizer
from tests.unit.models.updates import (
    LOSS,
    experience,
    largest_difference,
    settings,
)


def test_weight_decay_applies_only_to_matrices() -> None:
    model = tiny.causal("gpt2")
    optimizer = create_optimizer(model, 0.1, betas=(0.8, 0.9), weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert all(parameter.ndim > 1 for parameter in optimizer.param_groups[0]["params"])
    assert all(parameter.ndim <= 1 for parameter in optimizer.param_groups[1]["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_training_from_a_saved_optimizer_is_bit_identical(tmp_path: Path) -> None:
    data = experience(None)
    tiny.saved(tiny.classifier("llama"), tmp_path / "m")
    optimization = settings(learning_rate=1e-2)

    def step(critic: ValueModel, optimizer: torch.optim.Optimizer) -> None:
        update_value(critic, optimizer, data, optimization, ValueLossSettings(), 40)

    critic = load_critic(tmp_path / "m")
    optimizer = create_optimizer(critic, 0.0, weight_decay=0.1)
    step(critic, optimizer)
    save_critic(critic, tmp_path / "critic")
    for name in ("optimizer.safetensors", "again.safetensors"):
        save_optimizer(optimizer, tmp_path / name)
    assert (tmp_path / "optimizer.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    step(critic, optimizer)

    resumed = load_critic(tmp_path / "critic")
    other = create_optimizer(resumed, 0.0, weight_decay=0.1)
    load_optimizer(other, tmp_path / "optimizer.safetensors")
    assert {float(entry["step"]) for entry in other.state.values()} == {4.0}
    step(resumed, other)
    assert largest_difference(critic, resumed) == 0
    for one, two in zip(critic.parameters(), resumed.parameters(), strict=True):
        assert optimizer.state[one].keys() == other.state[two].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, other.state[two][name]) for name, value in optimizer.state[one].items())


def test_an_optimizer_without_steps_can_be_saved(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    save_optimizer(create_optimizer(model, 0.5), tmp_path / "o")
    fresh = create_optimizer(model, 0.1)
    load_optimizer(fresh, tmp_path / "o")
    assert not fresh.state


def test_moments_and_step_counts_are_loaded_but_not_hyperparameters(tmp_path: Path) -> None:
    model = tiny.causal("gpt2")
    optimizer = create_optimizer(model, 0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    update_policy(model, optimizer, experience(model), settings(), LOSS, 40)
    save_optimizer(optimizer, tmp_path / "o")
    fresh = create_optimizer(model, 0.1, betas=(0.5, 0.6), eps=1e-4, weight_decay=0.2)
    expected = [{name: group[name] for name in group if name != "params"} for group in fresh.param_groups]
    load_optimizer(fresh, tmp_path / "o")
    assert [{name: group[name] for name in group if name != "params"} for group in fresh.param_groups] == expected
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.2, 0.0]
    assert len(fresh.state) == len(list(model.parameters()))
    for parameter, entry in optimizer.state.items():
        assert all(torch.equal(value, fresh.state[parameter][name]) for name, value in entry.items())


def test_the_optimizer_state_of_another_model_is_refused(tmp_path: Path) -> None:
    small, large = tiny.causal("llama"), tiny.causal("llama", intermediate_size=56)
    optimizer = create_optimizer(large, 0.1)
    update_policy(large, optimizer, experience(large), settings(), LOSS, 40)
    save_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ModelError, match="shape"):
        load_optimizer(create_optimizer(small, 0.1), tmp_path / "o")
    with pytest.raises(ModelError, match="groups"):
        load_optimizer(create_optimizer(tiny.causal("gpt2"), 0.1), tmp_path / "o")
    (tmp_path / "o").write_bytes((tmp_path / "o").read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ModelError, match="cannot be read"):
        load_optimizer(optimizer, tmp_path / "nowhere")
