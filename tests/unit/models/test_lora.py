"""LoRA: an adapter computes the formula of the paper and does not change its base model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from quartet.config.models import LoraConfig
from quartet.errors import InvalidRequest, ModelError
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny
from tests.unit.models.adapters import ALPHA, BATCH, IDS, RANK, adapted, learn, same, snapshot, split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_new_adapter_does_not_change_the_outputs(kind: str, dtype: torch.dtype) -> None:
    model = tiny.causal(kind).to(dtype)
    before, state = model(IDS).logits, snapshot(model)
    adapter = add_adapter(model, "base", LoraConfig(rank=RANK, alpha=ALPHA))
    assert adapter.model is model
    assert torch.equal(model(IDS).logits, before)
    assert same(split(model.state_dict())[0], state)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable.keys() == {name for name, _ in model.named_parameters() if ".lora_" in name} != set()
    assert {parameter.dtype for parameter in trainable.values()} == {torch.float32}
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_linear_layer_except_the_vocabulary_projection_gets_an_adapter(kind: str) -> None:
    plain = tiny.causal(kind)
    expected = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not plain.get_output_embeddings()
    }
    model, _ = adapted(kind)
    assert {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == expected
    assert len(expected) >= 8


def test_only_target_modules_get_an_adapter() -> None:
    model, _ = adapted("llama", target_modules=("q_proj", "model.layers.1.mlp.up_proj"))
    assert {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        (
            "llama",
            "c_attn",
            "'c_attn': no layer has this name in LlamaForCausalLM; linear layers are, for example, .*q_proj",
        ),
        ("llama", "mlp", "'mlp': model.layers.0.mlp is not a linear layer"),
        ("gpt2", "wte", "'wte': transformer.wte is not a linear layer"),
        ("qwen2", "lm_head", r"lm_head: its weight is shared with another layer \(tied\)"),
    ],
)
def test_an_unusable_target_is_refused_with_examples_of_usable_ones(kind: str, target: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        adapted(kind, target_modules=(target,))


def test_initial_weights_depend_only_on_the_seed_and_the_layer() -> None:
    def start(seed: int, **changes: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed + 100)
        return split(snapshot(adapted("llama", seed=seed, **changes)[0]))[1]

    one = start(1)
    assert same(one, start(1))
    fewer = start(1, target_modules=("v_proj",))
    assert all(torch.equal(one[name], value) for name, value in fewer.items())
    other = start(2)
    for name, value in one.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < value.abs().max() <= bound
            assert abs(value.std().item() - bound / 3**0.5) < 0.25 * bound
    matrices = [value.flatten()[:20].tolist() for name, value in one.items() if ".lora_A." in name]
    assert len({tuple(matrix) for matrix in matrices}) == len(matrices), "layers must have different initial weights"


@pytest.mark.parametrize("target_modules", [(), ("c_attn", "query_key_value", "q_proj")])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_an_adapted_layer_computes_the_papers_formula(kind: str, target_modules: tuple[str, ...]) -> None:
    names = {"gpt2": ("c_attn",), "gpt_neox": ("query_key_value",)}.get(kind, ("q_proj",)) if target_modules else ()
    model, _ = adapted(kind, target_modules=names)
    learn(model, steps=2)
    plain = tiny.causal(kind).double()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = (getattr(module, part)["default"].weight.detach().double() for part in ("lora_A", "lora_B"))
            # Hu et al. 2021, section 4.1: h = W x + (alpha / r) B A x.
            delta = ALPHA / RANK * torch.einsum("or,ri->oi", b, a)
            layer = plain.get_submodule(name)
            with torch.no_grad():
                layer.weight += delta.T if isinstance(layer, Conv1D) else delta
    difference = (model(IDS).logits - plain(IDS).logits).abs().max()
    assert difference < 1e-4
    assert (model(IDS).logits - tiny.causal(kind)(IDS).logits).abs().max() > 100 * difference


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_an_update_changes_only_the_adapter(kind: str) -> None:
    model, adapter = adapted(kind)
    with adapter.off():
        reference = response_log_probs(model, BATCH, 0.8, 64)
    assert reference.tobytes() == response_log_probs(tiny.causal(kind), BATCH, 0.8, 64).tobytes()
    below, above = split(snapshot(model))
    optimizer = learn(model, steps=2)
    assert same(split(model.state_dict())[0], below)
    after = split(model.state_dict())[1]
    assert all(not torch.equal(after[name], value) for name, value in above.items())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(above)
    policy = response_log_probs(model, BATCH, 0.8, 64)
    with adapter.off():
        assert response_log_probs(model, BATCH, 0.8, 64).tobytes() == reference.tobytes()
    assert response_log_probs(model, BATCH, 0.8, 64).tobytes() == policy.tobytes() != reference.tobytes()


def test_the_adapter_is_enabled_and_trainable_after_an_error() -> None:
    model, adapter = adapted("llama")
    optimizer = learn(model)
    policy = model(IDS).logits
    with pytest.raises(InvalidRequest), adapter.off():
        response_log_probs(model, tiny.batch([60], [20]), 1.0, 64)
    assert torch.equal(model(IDS).logits, policy)
    learn(model, optimizer=optimizer)
    assert not torch.equal(model(IDS).logits, policy)


def test_the_engine_generates_with_the_adapter() -> None:
    model, _ = adapted("gpt2")
    learn(model, steps=3)
    requests = tiny.requests(5)
    result = tiny.generated(TorchEngine(model, frozenset({tiny.EOS}), 4), requests)
    plain = tiny.generated(TorchEngine(tiny.causal("gpt2"), frozenset({tiny.EOS}), 4), requests)
    assert [t.log_probs.tobytes() for t in result] != [t.log_probs.tobytes() for t in plain]
    for trajectory in result:
        ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
        full = model(ids[None]).logits[0].log_softmax(-1)[len(trajectory.prompt_ids) - 1 : -1]
        expected = full.gather(1, ids[len(trajectory.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(trajectory.log_probs, expected.detach(), atol=1e-4)
