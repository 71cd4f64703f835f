"""DoRA: magnitudes of the outputs are trained, as in peft, and saved, merged and restored with the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.optimizer import create_optimizer, load_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.host_tensors import host_tensors, load_tensors, named_weights
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import MergedWeights, add_adapter
from tests.unit.models import tiny, updates
from tests.unit.models.adapters import IDS, adapted, learn, same, snapshot, split
from tests.unit.models.saving import save_optimizer

KINDS = ["llama", "gpt2"]


def trained(kind: str = "llama", **changes: Any) -> tuple[Any, Any]:
    model, adapter = adapted(kind, dora=True, **changes)
    learn(model, steps=2)
    return model, adapter


def magnitudes(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in snapshot(model).items() if "magnitude" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_does_not_change_the_outputs(kind: str, dtype: torch.dtype) -> None:
    model = tiny.causal(kind).to(dtype)
    before = model(IDS).logits
    add_adapter(model, "base", LoraConfig(rank=2, dora=True))
    assert torch.equal(model(IDS).logits, before)
    assert {value.dtype for value in magnitudes(model).values()} == {torch.float32}


def test_updates_train_the_magnitudes_and_only_the_adapter() -> None:
    new, _ = adapted("llama", dora=True)
    model, _ = trained()
    assert same(split(snapshot(model))[0], split(snapshot(new))[0])
    before, after = magnitudes(new), magnitudes(model)
    assert len(after) == 14
    assert all(not torch.equal(before[name], value) for name, value in after.items())
    plain, _ = adapted("llama")
    learn(plain, steps=2)
    assert (plain(IDS).logits - model(IDS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_plain_peft_reads_the_adapter_and_computes_the_same_bits(kind: str, tmp_path: Path) -> None:
    model, adapter = trained(kind)
    tmp_path.joinpath("a").mkdir()
    adapter.snapshot()(tmp_path / "a")
    theirs: Any = peft.PeftModel.from_pretrained(tiny.causal(kind), str(tmp_path / "a")).eval()
    assert theirs.peft_config["default"].use_dora is True
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    # Gradients, too.
    for each in (theirs, model):
        each.requires_grad_(True)
        each(IDS).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, theirs.get_parameter(f"base_model.model.{name}").grad), name


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_what_the_adapter_does(kind: str, tmp_path: Path) -> None:
    model, adapter = trained(kind)
    adapter.snapshot_merged()(tmp_path / "m")
    expected = model(IDS).logits
    difference = (load_causal_lm(tmp_path / "m")(IDS).logits - expected).abs().max()
    assert difference < 1e-4
    assert (tiny.causal(kind)(IDS).logits - expected).abs().max() > 100 * difference
    copies = MergedWeights(adapter)
    assert (copies.model(IDS).logits - expected).abs().max() < 1e-4
    tmp_path.joinpath("a").mkdir()
    adapter._base = str(tmp_path / "base")
    tiny.causal(kind).save_pretrained(tmp_path / "base")
    adapter.snapshot()(tmp_path / "a")
    assert (load_causal_lm(tmp_path / "a")(IDS).logits - expected).abs().max() < 1e-4


def test_a_generator_gets_the_magnitudes_with_the_weights() -> None:
    model, adapter = trained()
    other, received = adapted("llama", dora=True)
    tensors = host_tensors(named_weights(model, adapter))
    load_tensors(named_weights(other, received), tensors, tensors)
    assert torch.equal(other(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_training_from_a_checkpoint_is_bit_identical(ratio: float, tmp_path: Path) -> None:
    model, adapter = adapted("llama", dora=True, dropout=0.2)
    optimizer = create_optimizer(model, 1e-2, weight_decay=0.1, lora_ratio=ratio)
    learn(model, 2, optimizer)
    tmp_path.joinpath("a").mkdir()
    adapter.snapshot()(tmp_path / "a")
    save_optimizer(optimizer, tmp_path / "o")
    restored, other = adapted("llama", dora=True, dropout=0.2, seed=7)
    other.read(tmp_path / "a")
    second = create_optimizer(restored, 1e-2, weight_decay=0.1, lora_ratio=ratio)
    load_optimizer(second, tmp_path / "o")
    learn(model, 1, optimizer), learn(restored, 1, second)
    assert same(snapshot(model), snapshot(restored))
    assert not any(module.training for module in model.modules())


def test_dropout_has_its_effect_and_repeats_with_checkpointing() -> None:
    results = []
    for rate, checkpointing in ((0.3, False), (0.3, True), (0.0, False)):
        model, _ = adapted("llama", dora=True, dropout=rate)
        optimizer, data = create_optimizer(model, 1e-2, eps=1e-5), updates.experience(model)
        with activation_checkpointing(model, checkpointing):
            for _ in range(2):
                update_policy(model, optimizer, data, updates.settings(learning_rate=1e-2), updates.LOSS, 40)
        results.append(snapshot(model))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_experts_and_engines_without_magnitudes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"lora\.dora: .*experts.* is a parameter of experts"):
        adapted("mixtral", dora=True)
    with pytest.raises(ModelError, match=r"lora\.dora: this engine takes adapters without magnitudes"):
        list(adapted("llama", dora=True)[1].matrices())
