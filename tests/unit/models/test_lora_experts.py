"""LoRA on the experts of mixture-of-experts models, which are parameters and not layers."""

from __future__ import annotations

import contextlib
import re
import threading
from copy import deepcopy
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch.nn.utils import parametrize

from quartet.config.models import LoraConfig
from quartet.contract.generation import SamplingParameters
from quartet.contrib.triton.lora_tensors import lora_tensors
from quartet.errors import ModelError
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.optimizer import load_optimizer
from quartet.models.weights import lora
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter, matrices_without_adapter
from quartet.weight_transfer.tensors import combined_digest
from tests.architectures import models
from tests.unit.models import tiny
from tests.unit.models.adapters import ALPHA, IDS, RANK, adapted, files, learn, optimizer_of, same, snapshot, weight_set
from tests.unit.models.saving import save_adapter, save_optimizer, save_policy

# Experts beside shared ones, and experts with biases and the other order of dimensions. The other kinds have the former's.
DISTINCT = ("qwen2_moe", "gpt_oss")
EVERY_KIND = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DISTINCT else pytest.mark.slow) for kind in tiny.MIXTURES]
)


def adapters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters, and check that they are those of the adapter."""
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert trainable.keys() == {name for name, _ in model.named_parameters() if ".lora_" in name}
    return trainable


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_on_experts_does_not_change_the_outputs(kind: str, dtype: torch.dtype) -> None:
    model = tiny.causal(kind).to(dtype)
    before = model(IDS).logits
    adapter = add_adapter(model, "base", LoraConfig(rank=RANK, alpha=ALPHA))
    assert torch.equal(model(IDS).logits, before)
    with adapter.off():
        assert torch.equal(model(IDS).logits, before)
    assert {value.dtype for value in adapters_of(model).values()} == {torch.float32}


@EVERY_KIND
def test_every_matrix_except_routers_has_an_adapter_that_an_update_trains(kind: str) -> None:
    model, adapter = adapted(kind)
    assert all(re.search(r"(gate|router)(\.weight)?$", name) for name in matrices_without_adapter(model))
    experts = [name for name, _ in model.named_parameters() if ".experts." in name and ".lora_B" in name]
    assert len(experts) == 2 * 2, "two parameters of experts in each of two layers"
    before, base = snapshot(model), tiny.causal(kind)
    learn(model, steps=2)
    for name in adapters_of(model):
        assert not torch.equal(model.state_dict()[name], before[name]), name
    with adapter.off():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert not torch.equal(model(IDS).logits, base(IDS).logits)


@EVERY_KIND
def test_each_expert_computes_the_papers_formula(kind: str) -> None:
    model, _ = adapted(kind)
    learn(model, steps=2)
    plain = tiny.causal(kind)
    wrapper = model.model.layers[0].mlp.experts
    down, up = wrapper, wrapper.base_layer
    assert {down.parameter_name, up.parameter_name} == {"down_proj", "gate_up_proj"}
    for layer in (down, up):
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        weight = plain.model.layers[0].mlp.experts.get_parameter(layer.parameter_name)
        for expert in range(4):
            product = b[:, expert::4] @ a[RANK * expert : RANK * (expert + 1)]
            delta = ALPHA / RANK * (product.T if kind == "gpt_oss" else product)
            with torch.no_grad():
                weight[expert] += delta
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and ".experts" not in name:
            with torch.no_grad():
                plain.get_submodule(name).weight += (
                    ALPHA / RANK * module.lora_B["default"].weight @ module.lora_A["default"].weight
                )
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    expected, result = (of.model.layers[0].mlp(hidden) for of in (plain, model))
    for one, other in zip(_tensors(expected), _tensors(result), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _tensors(output: object) -> list[torch.Tensor]:
    return [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, torch.Tensor)]


@EVERY_KIND
def test_the_merged_export_is_a_plain_model(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=2)
    logits, state = model(IDS).logits, snapshot(model)
    save_policy(model, None, tmp_path / "merged", adapter)
    assert same(model.state_dict(), state)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (plain(IDS).logits - logits).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")
@EVERY_KIND
def test_plain_peft_reads_the_adapter_and_computes_the_same_bits(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=2)
    save_adapter(adapter, None, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny.causal(kind), tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=IDS).logits, model(IDS).logits)


@EVERY_KIND
def test_an_adapter_directory_loads_as_the_merged_model(kind: str, tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal(kind), tmp_path / "base"))
    model = load_causal_lm(base)
    adapter = add_adapter(model, base, LoraConfig(rank=RANK, alpha=ALPHA))
    learn(model, steps=2)
    save_adapter(adapter, None, tmp_path / "adapter")
    save_policy(model, None, tmp_path / "merged", adapter)
    loaded = load_causal_lm(tmp_path / "adapter")
    assert same(loaded.state_dict(), load_causal_lm(tmp_path / "merged").state_dict())
    assert (loaded(IDS).logits - model(IDS).logits).abs().max() < 1e-5
    assert not any(hasattr(module, "lora_A") for module in loaded.modules())


@EVERY_KIND
def test_training_from_a_checkpoint_with_optimizer_is_bit_identical(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    optimizer = learn(model, steps=2)
    save_adapter(adapter, None, tmp_path / "c")
    save_optimizer(optimizer, tmp_path / "c" / "optimizer.safetensors")
    learn(model, optimizer=optimizer)
    loaded, other = adapted(kind, seed=9)
    restored = optimizer_of(loaded)
    other.read(tmp_path / "c")
    load_optimizer(restored, tmp_path / "c" / "optimizer.safetensors")
    learn(loaded, optimizer=restored)
    assert same(dict(sorted(loaded.state_dict().items())), dict(sorted(model.state_dict().items())))
    save_adapter(adapter, None, tmp_path / "one")
    save_adapter(other, None, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@EVERY_KIND
def test_activation_checkpointing_does_not_change_the_bits(kind: str) -> None:
    (plain, _), (recomputed, _) = adapted(kind), adapted(kind)
    learn(plain, steps=2)
    with activation_checkpointing(recomputed):
        learn(recomputed, steps=2)
    assert same(plain.state_dict(), recomputed.state_dict())


@EVERY_KIND
def test_an_engine_with_separate_weights_follows_the_adapter(kind: str) -> None:
    model, adapter = adapted(kind)
    engine = DetachedTorchEngine(*deepcopy((model, adapter)), frozenset(), 4)
    learn(model, steps=2)
    weights = weight_set(model, adapter)
    assert combined_digest(engine.load_weights(weights, weights.tensors)) == weights.digest
    for response in engine.generate(tiny.requests(3), SamplingParameters(6), 0, lambda: False):
        prompt, ids = response.request.prompt_ids, response.token_ids
        batch = tiny.batch([len(prompt)], [len(ids)])
        batch.token_ids[:] = [*prompt, *ids]
        assert abs(response_log_probs(model, batch, 1.0, 64) - response.log_probs).max() < 1e-5


def is_free() -> bool:
    """Return whether another thread could start to compute experts with an adapter now."""
    results = []

    def attempt() -> None:
        results.append(lora._computing_experts.acquire(blocking=False))
        if results[0]:
            lora._computing_experts.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_at_a_time_adds_an_adapter_to_experts(fails: bool) -> None:
    model, _ = adapted("mixtral")
    seen = []

    def inside(*_: object) -> None:
        seen.append(is_free())
        if fails:
            raise RuntimeError("in the experts")

    model.model.layers[0].mlp.experts.get_base_layer().register_forward_pre_hook(inside)
    with pytest.raises(RuntimeError, match="in the experts") if fails else contextlib.nullcontext():
        model(IDS)
    assert seen == [False]
    assert is_free()
    assert not parametrize._cache


def test_experts_can_be_left_out_or_chosen_alone() -> None:
    model, _ = adapted("qwen2_moe", target_modules=("q_proj", "shared_expert.down_proj"))
    assert not any(".experts." in name for name in adapters_of(model))
    assert "model.layers.*.mlp.experts.gate_up_proj" in matrices_without_adapter(model)
    model, _ = adapted("qwen2_moe", target_modules=("experts.down_proj",))
    assert all(".experts." in name for name in adapters_of(model))
    with pytest.raises(ModelError, match=r"'experts': model.layers.0.mlp.experts is not a linear layer"):
        adapted("qwen2_moe", target_modules=("experts",))


def test_an_engine_for_adapters_of_linear_layers_refuses_experts() -> None:
    with pytest.raises(
        ModelError, match=r"experts\.\w+ gets an adapter as a parameter.*set actor\.lora\.target_modules"
    ):
        lora_tensors(adapted("mixtral")[1])


def test_layers_that_peft_leaves_out_are_an_error() -> None:
    # Without a layer of experts, peft takes the layers of these names for experts nevertheless.
    model = models.causal_lm("beam", mlp_layer_types=["dense", "dense"])
    with pytest.raises(
        ModelError, match=r"peft takes other layers of BeamForCausalLM .* model\.layers\.0\.mlp\.down_proj; set"
    ):
        add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
