"""The moving average of a policy's weights: its formula, its checkpoints, and that it never changes the policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.models.training.optimizer import MasterWeightAdamW, create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.training.weight_average import EMA_FILE, WeightAverage, apply_average
from quartet.models.weights.loading import freeze_parameters
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates

DECAY = 0.75
DTYPES = [torch.float32, torch.bfloat16]


def trained(dtype: torch.dtype = torch.float32, lora: bool = False) -> tuple[Any, MasterWeightAdamW]:
    model = tiny.causal("llama", initializer_range=0.1).to(dtype)
    if lora:
        add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
    return model, create_optimizer(model, 1e-2)


def learn(model: Any, optimizer: MasterWeightAdamW, seed: int) -> None:
    settings = dataclasses.replace(updates.settings(learning_rate=1e-2), num_mini_batches=1)
    update_policy(model, optimizer, updates.experience(model, seed), settings, updates.LOSS, 40)


def saved(average: WeightAverage, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    average.snapshot()(directory)
    return safetensors.torch.load_file(directory / EMA_FILE)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_average_is_the_recursion_over_the_float32_weights(dtype: torch.dtype, lora: bool, tmp_path: Path) -> None:
    model, optimizer = trained(dtype, lora)
    average = WeightAverage(model, optimizer, DECAY)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def weights() -> dict[str, torch.Tensor]:
        steps = optimizer.stepped_parameters()
        pairs = [(optimizer.rounded(w) if optimizer.has_master_weight(w) else w, w) for w in steps]
        return {names[id(parameter)]: weight.detach().clone().double() for parameter, weight in pairs}

    expected = weights()
    for seed in range(3):
        learn(model, optimizer, seed)
        average.update()
        expected = {name: DECAY * expected[name] + (1 - DECAY) * now for name, now in weights().items()}
    result = saved(average, tmp_path)
    assert result.keys() == expected.keys()
    assert all(".lora_" in name for name in result) == lora
    for name, value in result.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-6)


def test_equal_weights_leave_the_average_as_it_is(tmp_path: Path) -> None:
    model, optimizer = trained()
    average = WeightAverage(model, optimizer, 0.992)
    before = saved(average, tmp_path)
    for _ in range(5):
        average.update()
    after = saved(average, tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_frozen_weights_have_no_average(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    freeze_parameters(model, ("*.layers.0.*",))
    average = WeightAverage(model, create_optimizer(model, 1e-2), DECAY)
    assert not any(".layers.0." in name for name in saved(average, tmp_path))


@pytest.mark.parametrize("dtype", DTYPES)
def test_applying_the_average_changes_the_model_only_inside_the_context(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = trained(dtype)
    average = WeightAverage(model, optimizer, DECAY)
    learn(model, optimizer, 0)
    average.update()
    expected = {name: value.to(dtype) for name, value in saved(average, tmp_path).items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with average.applied():
        inside = dict(model.named_parameters())
        assert all(torch.equal(inside[name], value) for name, value in expected.items())
        assert any(not torch.equal(inside[name], before[name]) for name in expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other, _ = trained(dtype)
    apply_average(other, tmp_path)
    assert all(torch.equal(dict(other.named_parameters())[name], value) for name, value in expected.items())


def test_a_restored_average_continues_bit_identically(tmp_path: Path) -> None:
    model, optimizer = trained(torch.bfloat16)
    average = WeightAverage(model, optimizer, DECAY)
    learn(model, optimizer, 0)
    average.update()
    saved(average, tmp_path / "one")
    restored = WeightAverage(model, optimizer, DECAY)
    restored.read(tmp_path / "one")
    learn(model, optimizer, 1)
    for each in (average, restored):
        each.update()
    for each, name in ((average, "a"), (restored, "b")):
        saved(each, tmp_path / name)
    assert (tmp_path / "a" / EMA_FILE).read_bytes() == (tmp_path / "b" / EMA_FILE).read_bytes()


def test_a_checkpoint_without_an_average_starts_it_at_the_current_weights(tmp_path: Path) -> None:
    model, optimizer = trained()
    average = WeightAverage(model, optimizer, DECAY)
    average.read(tmp_path)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(value, parameters[name]) for name, value in saved(average, tmp_path).items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"broken", "cannot be read"),
        ({"other": torch.zeros(1)}, "is only in the file or only in the model"),
        ("wrong shape", r"expected torch.float32 \["),
    ],
)
def test_a_broken_average_or_that_of_another_model_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    average = WeightAverage(model, optimizer, DECAY)
    if content == "wrong shape":
        content = {name: torch.zeros(3, 3, 3) for name in saved(average, tmp_path)}
    if isinstance(content, bytes):
        (tmp_path / EMA_FILE).write_bytes(content)
    else:
        safetensors.torch.save_file(content, tmp_path / EMA_FILE)
    with pytest.raises(ModelError, match=message):
        average.read(tmp_path)
