"""The torch engine with a merged LoRA adapter: exact merging, shared weights, and new weights after updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import Trajectory
from quartet.errors import ModelError
from quartet.models.generation.torch_engine import DetachedTorchEngine, TorchEngine
from quartet.models.weights.host_tensors import named_weights
from quartet.weight_transfer.tensors import WeightSet
from tests.unit.models import tiny
from tests.unit.models.adapters import adapted, learn, same, snapshot, weight_set
from tests.unit.models.saving import save_policy

STOPS = frozenset({tiny.EOS})
REQUESTS = tiny.requests(12)
NO_TENSORS = WeightSet(0, b"", {})


def bits(trajectories: list[Trajectory]) -> list[tuple[bytes, bytes]]:
    return [(item.response_ids.tobytes(), item.log_probs.tobytes()) for item in trajectories]


def merged_model(model: Any, adapter: Any, folder: Path) -> Any:
    """Return the model that is saved with its adapter merged."""
    save_policy(model, None, folder, adapter)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=next(model.parameters()).dtype).eval()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_responses_are_those_of_the_merged_checkpoint_after_every_update(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    engine, optimizer = TorchEngine(model, STOPS, 8, merged=adapter), None
    assert engine.batch_invariant == TorchEngine(tiny.causal(kind), STOPS, 8).batch_invariant
    for step in range(2):
        optimizer = learn(model, optimizer=optimizer)
        engine.load_weights(NO_TENSORS, [])
        expected = TorchEngine(merged_model(model, adapter, tmp_path / str(step)), STOPS, 8)
        assert bits(tiny.generated(engine, REQUESTS)) == bits(tiny.generated(expected, REQUESTS))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_in_float32_the_log_probs_are_those_of_the_adapted_model_up_to_rounding(kind: str) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=3)
    results = [
        tiny.generated(engine, REQUESTS)
        for engine in (TorchEngine(model, STOPS, 8, merged=adapter), TorchEngine(model, STOPS, 8))
    ]
    for merged, separate in zip(*results, strict=True):
        assert merged.response_ids.tolist() == separate.response_ids.tolist()
        np.testing.assert_allclose(merged.log_probs, separate.log_probs, atol=1e-5)


def test_generation_changes_no_weight_and_copies_only_the_adapted_matrices() -> None:
    model, adapter = adapted("qwen2")
    learn(model)
    before = snapshot(model)
    engine = TorchEngine(model, STOPS, 8, merged=adapter)
    tiny.generated(engine, REQUESTS)
    assert same(before, snapshot(model))
    own = {tensor.data_ptr() for tensor in model.parameters()}
    copied = [name for name, tensor in engine._model.named_parameters() if tensor.data_ptr() not in own]
    assert len(copied) == len(adapter.linear_layers()) == 2 * 7
    assert not any("embed" in name or "norm" in name or "bias" in name for name in copied)


def test_released_weights_are_merged_again_for_the_same_bits() -> None:
    model, adapter = adapted("llama")
    learn(model)
    engine = TorchEngine(model, STOPS, 8, merged=adapter)
    expected = bits(tiny.generated(engine, REQUESTS))
    engine.sleep(everything=False)
    assert bits(tiny.generated(engine, REQUESTS)) == expected
    engine.sleep()
    assert any(parameter.numel() == 0 for parameter in engine._model.parameters())
    assert bits(tiny.generated(engine, REQUESTS)) == expected


@pytest.mark.parametrize("by", ["load_weights", "copy_weights"])
def test_a_detached_engine_merges_the_weights_that_it_gets_and_attests_the_adapter(by: str) -> None:
    trained, adapter = adapted("llama")
    learn(trained)
    sent = weight_set(trained, adapter)
    fresh = DetachedTorchEngine(*adapted("llama", seed=5), STOPS, 8, merge_adapter=True)

    sampling = SamplingParameters(12)
    before = [list(item.token_ids) for item in fresh.generate(REQUESTS, sampling, 0, lambda: False)]
    if by == "load_weights":
        digests = fresh.load_weights(sent, list(sent.tensors))
    else:
        digests = fresh.copy_weights(iter(named_weights(trained, adapter).items()))
    assert digests == DetachedTorchEngine(trained, adapter, STOPS, 8).load_weights(sent, [])
    result = {item.request.id: list(item.token_ids) for item in fresh.generate(REQUESTS, sampling, 0, lambda: False)}
    expected = tiny.generated(TorchEngine(trained, STOPS, 8, merged=adapter), REQUESTS)
    assert result == {item.id: item.response_ids.tolist() for item in expected}
    assert list(result.values()) != before


def test_in_half_precision_the_merged_weights_are_rounded_once() -> None:
    model = tiny.causal("llama").to(torch.bfloat16)
    adapter = tiny_adapter(model)
    [layer, *_] = adapter.linear_layers()
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(adapter.merged_weight(layer), exact.to(torch.bfloat16))


def tiny_adapter(model: Any) -> Any:
    from quartet.models.weights.lora import add_adapter

    adapter = add_adapter(model, "base", LoraConfig(rank=3, alpha=12.0))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0, 0.1)
    return adapter


def test_adapters_of_experts_cannot_be_merged() -> None:
    model, adapter = adapted("mixtral")
    with pytest.raises(ModelError, match=r"set actor\.lora\.target_modules to linear layers outside the experts"):
        TorchEngine(model, STOPS, 8, merged=adapter)
