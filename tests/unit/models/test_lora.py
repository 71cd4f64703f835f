"""LoRA: what an adapter computes, that the model below stays as it is, and what is written and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from quartet.errors import InvalidRequest, ModelError
from quartet.models.engine import TorchEngine
from quartet.models.loading import (
    load_causal_lm,
    load_critic,
    load_tokenizer,
    tokenizer_fingerprint,
)
from quartet.models.lora import Adapter, add_adapter
from quartet.models.optimizer import create_optimizer, load_optimizer
from quartet.models.scoring import response_log_probs, response_values
from quartet.models.training import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.types import Experience, OptimizationSettings, PolicyLossSettings, ValueLossSettings
from tests.unit.models import tiny
from tests.unit.models.saving import save_adapter, save_critic, save_critic_adapter, save_optimizer, save_policy

ROOT = Path(__file__).parents[3]
IDS = torch.tensor([[3, 4, 5, 6], [9, 8, 2, 7]])
PROMPTS, RESPONSES = [3, 1, 5], [4, 6, 3]
BATCH = tiny.batch(PROMPTS, RESPONSES)
SETTINGS = OptimizationSettings(epochs=2, mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
RANK, ALPHA = 3, 12.0


def experience(step: int = 1) -> Experience:
    """Random numbers on ``BATCH``."""
    generator, tokens = np.random.default_rng(step), sum(RESPONSES)

    def noise() -> Any:
        return generator.standard_normal(tokens).astype(np.float32)

    return Experience(
        run="r",
        step=step,
        policy_version=step - 1,
        ids=("a", "b", "c"),
        batch=BATCH,
        scores=np.zeros(3, np.float32),
        log_probs=-1 + 0.1 * noise(),
        reference_log_probs=-1 + 0.1 * noise(),
        values=noise(),
        advantages=noise(),
        returns=noise(),
        actor_mask=np.ones(tokens, np.float32),
    )


def adapted(kind: str, name: str = "base", **changes: Any) -> tuple[Any, Adapter]:
    """A tiny model with a fresh adapter."""
    model = tiny.causal(kind)
    return model, add_adapter(model, name, **{"rank": RANK, "alpha": ALPHA, "seed": 1, **changes})


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return create_optimizer(model, 1e-2, (0.9, 0.95), 1e-8, 0.1)


def learn(model: Any, steps: int = 1, optimizer: torch.optim.AdamW | None = None) -> torch.optim.AdamW:
    """So many updates of a policy."""
    optimizer = optimizer or optimizer_of(model)
    for step in range(1, steps + 1):
        update_policy(model, optimizer, experience(step), SETTINGS, PolicyLossSettings(), 64)
    return optimizer


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def split(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state below the adapter, under the names without one, and the adapter's."""
    below = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
    return below, {name: value for name, value in state.items() if ".lora_" in name}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], value) for name, value in b.items())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_fresh_adapter_changes_no_bit_of_what_the_model_computes(kind: str, dtype: torch.dtype) -> None:
    model = tiny.causal(kind).to(dtype)
    before, state = model(IDS).logits, snapshot(model)
    adapter = add_adapter(model, "base", RANK, ALPHA)
    assert adapter.model is model
    assert torch.equal(model(IDS).logits, before)
    assert same(split(model.state_dict())[0], state)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable.keys() == {name for name, _ in model.named_parameters() if ".lora_" in name} != set()
    assert {parameter.dtype for parameter in trainable.values()} == {torch.float32}
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_linear_layer_but_the_vocabulary_projection_gets_one(kind: str) -> None:
    plain = tiny.causal(kind)
    expected = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not plain.get_output_embeddings()
    }
    model, _ = adapted(kind)
    assert {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == expected
    assert len(expected) >= 8


def test_only_the_layers_that_are_named_get_one() -> None:
    model, _ = adapted("llama", target_modules=("q_proj", "model.layers.1.mlp.up_proj"))
    assert {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        ("llama", "c_attn", "'c_attn': no layer has this name in LlamaForCausalLM; there are, .*q_proj"),
        ("llama", "mlp", "'mlp': model.layers.0.mlp is not a linear layer"),
        ("gpt2", "wte", "'wte': transformer.wte is not a linear layer"),
        ("qwen2", "lm_head", r"lm_head: its weight is shared with another layer \(tied\)"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_named_with_some_that_can(kind: str, target: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        adapted(kind, target_modules=(target,))


def test_the_start_follows_from_the_seed_and_the_layer_alone() -> None:
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
    assert len({tuple(matrix) for matrix in matrices}) == len(matrices), "layers start differently"


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
def test_an_update_moves_the_adapter_and_no_bit_of_the_model_below(kind: str) -> None:
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


def test_the_adapter_is_back_on_and_learns_after_an_error() -> None:
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
    asked = tiny.requests(5)
    found = tiny.generated(TorchEngine(model, frozenset({tiny.EOS}), 4), asked)
    plain = tiny.generated(TorchEngine(tiny.causal("gpt2"), frozenset({tiny.EOS}), 4), asked)
    assert [t.log_probs.tobytes() for t in found] != [t.log_probs.tobytes() for t in plain]
    for trajectory in found:
        ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
        full = model(ids[None]).logits[0].log_softmax(-1)[len(trajectory.prompt_ids) - 1 : -1]
        expected = full.gather(1, ids[len(trajectory.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(trajectory.log_probs, expected.detach(), atol=1e-4)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_merged_export_is_a_plain_model_and_leaves_the_trained_one_alone(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=2)
    logits, state = model(IDS).logits, snapshot(model)
    for name in ("merged", "again"):
        save_policy(model, tiny.tokenizer(), tmp_path / name, adapter)
    assert same(model.state_dict(), state)
    assert torch.equal(model(IDS).logits, logits)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.state_dict().keys() == tiny.causal(kind).state_dict().keys()
    assert (plain(IDS).logits - logits).abs().max() < 1e-5
    assert files(tmp_path / "merged") == files(tmp_path / "again")
    assert load_tokenizer(tmp_path / "merged")("w5").input_ids == [5]
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_merged_model_in_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model = tiny.causal("qwen2").bfloat16()
    adapter = add_adapter(model, "base", RANK, ALPHA)
    learn(model)
    save_policy(model, None, tmp_path / "m", adapter)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    layer = model.model.layers[0].mlp.up_proj
    delta = ALPHA / RANK * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = layer.base_layer.weight.double() + delta
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert (stored["model.layers.0.mlp.up_proj.weight"].double() - exact).abs().max() <= exact.abs().max() * 2**-8


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_plain_peft_reads_the_adapter_and_computes_the_same_bits(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=2)
    save_adapter(adapter, tiny.tokenizer(), tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files(tmp_path / "adapter").keys()
    again = peft.PeftModel.from_pretrained(tiny.causal(kind), tmp_path / "adapter").eval()
    assert torch.equal(again(input_ids=IDS).logits, model(IDS).logits)


def test_the_adapters_config_names_the_base_and_no_other_place(tmp_path: Path) -> None:
    model = load_causal_lm(tiny.saved(tiny.causal("llama"), tmp_path / "secret-place"))
    adapter = add_adapter(model, "owner/model", 4, 8.0)
    save_adapter(adapter, None, tmp_path / "adapter")
    text = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert "secret-place" not in text
    config = json.loads(text)
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == ("owner/model", 4, 8)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["peft_type"], config["task_type"], config["lora_dropout"]) == ("LORA", "CAUSAL_LM", 0.0)


def test_the_same_weights_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from tests.unit.models.test_lora import adapted, save_adapter, tiny\n"
        "save_adapter(adapted('llama')[1], tiny.tokenizer(), pathlib.Path(sys.argv[1]))\n"
    )
    # Sets of names come in another order under another hash seed.
    environment = {**os.environ, "PYTHONHASHSEED": "4" if os.environ.get("PYTHONHASHSEED") != "4" else "5"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, cwd=ROOT, env=environment)
    save_adapter(adapted("llama")[1], tiny.tokenizer(), tmp_path / "here")
    assert files(tmp_path / "here") == files(tmp_path / "there")


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_an_adapters_directory_loads_as_the_merged_model(kind: str, tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal(kind), tmp_path / "base"))
    model = load_causal_lm(base)
    adapter = add_adapter(model, base, RANK, ALPHA)
    learn(model, steps=2)
    save_adapter(adapter, tiny.tokenizer(), tmp_path / "adapter")
    save_policy(model, tiny.tokenizer(), tmp_path / "merged", adapter)
    loaded = load_causal_lm(tmp_path / "adapter")
    assert same(loaded.state_dict(), load_causal_lm(tmp_path / "merged").state_dict())
    assert (loaded(IDS).logits - model(IDS).logits).abs().max() < 1e-5
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(hasattr(module, "lora_A") for module in loaded.modules())
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "adapter")) == tokenizer_fingerprint(tiny.tokenizer())


def test_an_adapter_on_an_adapter_is_merged_into_the_merged(tmp_path: Path) -> None:
    model = tiny.causal("gpt2")
    tiny.tokenizer().save_pretrained(tiny.saved(model, tmp_path / "base"))
    below = tmp_path / "base"
    for name in ("first", "second"):
        model = load_causal_lm(below)
        adapter = add_adapter(model, str(below), RANK, ALPHA, seed=len(name))
        learn(model)
        save_adapter(adapter, None, tmp_path / name)
        below = tmp_path / name
    assert (load_causal_lm(below)(IDS).logits - model(IDS).logits).abs().max() < 1e-5
    # Neither of them has a tokenizer of its own.
    assert load_tokenizer(below)("w7").input_ids == [7]


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def own_base(directory: Path) -> None:
    edit(directory, base_model_name_or_path=str(directory))


def no_base(directory: Path) -> None:
    edit(directory, base_model_name_or_path=None)


def base_elsewhere(directory: Path) -> None:
    edit(directory, base_model_name_or_path="/nowhere/at/all")


def base_a_classifier(directory: Path) -> None:
    other = tiny.saved(tiny.classifier("llama"), directory.parent / "classifier")
    edit(directory, base_model_name_or_path=str(other))


def base_of_another_size(directory: Path) -> None:
    other = tiny.saved(tiny.causal("llama", hidden_size=16), directory.parent / "other")
    edit(directory, base_model_name_or_path=str(other))


def other_method(directory: Path) -> None:
    edit(directory, peft_type="IA3")


def broken_config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{")


def other_targets(directory: Path) -> None:
    edit(directory, target_modules=["c_attn"])


def fewer_targets(directory: Path) -> None:
    edit(directory, target_modules=["q_proj"])


def truncated(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def pickled(directory: Path) -> None:
    tensors = safetensors.torch.load_file(directory / "adapter_model.safetensors")
    # Whole and harmless, so that only the rule against pickles refuses it.
    torch.save(tensors, directory / "adapter_model.bin")  # noqa: TID251 - a file that is to be refused
    (directory / "adapter_model.safetensors").unlink()


def weight_missing(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.__delitem__(min(tensors)))


def weight_of_another_shape(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({min(tensors): torch.zeros(RANK, 31)}))


@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (own_base, "is its own base"),
        (no_base, "names no base_model_name_or_path"),
        (base_elsewhere, "its base model: model /nowhere/at/all: no such directory"),
        (base_a_classifier, "its base model: .*expected a causal language model"),
        (base_of_another_size, r"has shape \(32, 3\), the model expects \(16, 3\)"),
        (other_method, "peft_type 'IA3'; expected LORA"),
        (broken_config, "adapter_config.json cannot be read"),
        (other_targets, "LoRA adapter cannot be used: .*c_attn"),
        (fewer_targets, "has too many: 24 weights, the first 'base_model.model.model.layers.0.mlp.down_proj"),
        (truncated, "adapter_model.safetensors: cannot be read"),
        (pickled, "no adapter_model.safetensors; pickled adapters are not read"),
        (weight_missing, "lacks 1 weights, the first 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'"),
        (weight_of_another_shape, r"has shape \(3, 31\), the model expects \(3, 48\)"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_one_line_that_names_it(
    breaking: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    base = str(tiny.saved(tiny.causal("llama"), tmp_path / "base"))
    directory = tmp_path / "adapter"
    save_adapter(adapted("llama", base)[1], None, directory)
    load_causal_lm(directory)
    breaking(directory)
    with pytest.raises(ModelError, match=words) as caught:
        load_causal_lm(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_its_optimizer_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    model, adapter = adapted("llama")
    optimizer = learn(model, steps=2)
    save_adapter(adapter, None, tmp_path / "c")
    save_optimizer(optimizer, tmp_path / "c" / "optimizer.safetensors")
    learn(model, optimizer=optimizer)
    again, other = adapted("llama", seed=9)
    restored = optimizer_of(again)
    other.read(tmp_path / "c")
    load_optimizer(restored, tmp_path / "c" / "optimizer.safetensors")
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in again.named_parameters())
    learn(again, optimizer=restored)
    assert same(again.state_dict(), model.state_dict())


def test_reading_an_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    save_adapter(adapted("llama", rank=5)[1], None, tmp_path / "wide")
    model, adapter = adapted("llama")
    learn(model)
    state = snapshot(model)
    with pytest.raises(ModelError, match=r"shape \(5, 48\), the model expects \(3, 48\)"):
        adapter.read(tmp_path / "wide")
    assert same(model.state_dict(), state)


def critic_base(kind: str, source: str, directory: Path) -> str:
    """A checkpoint that a critic can start from, of a causal LM, a classifier or a critic."""
    if source == "critic":
        save_critic(ValueModel.of_classifier(tiny.classifier(kind)), directory)
    else:
        tiny.saved(tiny.causal(kind) if source == "causal" else tiny.classifier(kind), directory)
    return str(directory)


@pytest.mark.parametrize("source", ["causal", "classifier", "critic"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_critic_learns_in_adapter_and_head_and_survives_both_saves(kind: str, source: str, tmp_path: Path) -> None:
    base = critic_base(kind, source, tmp_path / "base")
    critic = load_critic(base)
    before = response_values(critic, BATCH, 64)
    below = snapshot(critic.backbone)
    adapter = add_adapter(critic.backbone, base, RANK, ALPHA)
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
    again, merged = load_critic(tmp_path / "adapter"), load_critic(tmp_path / "merged")
    assert same(again.state_dict(), merged.state_dict())
    np.testing.assert_allclose(response_values(again, BATCH, 64), values, atol=1e-5)
    assert np.abs(values - before).max() > 1e-3
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert load_tokenizer(tmp_path / "adapter")("w7").input_ids == [7]


def test_a_critic_starts_from_a_policys_adapter_at_zero(tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal("llama"), tmp_path / "base"))
    model, adapter = adapted("llama", base)
    learn(model)
    save_adapter(adapter, None, tmp_path / "adapter")
    critic = load_critic(tmp_path / "adapter")
    assert response_values(critic, BATCH, 64).tolist() == [0.0] * sum(RESPONSES)
    merged = load_causal_lm(tmp_path / "adapter")
    assert same(critic.backbone.state_dict(), merged.model.state_dict())


def test_a_critics_adapter_with_a_broken_base_or_head_is_one_line(tmp_path: Path) -> None:
    base = critic_base("llama", "classifier", tmp_path / "base")
    critic = load_critic(base)
    save_critic_adapter(critic, tmp_path / "a", add_adapter(critic.backbone, base, RANK, ALPHA))
    (tmp_path / "a" / "value_head.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="value head"):
        load_critic(tmp_path / "a")
    edit(tmp_path / "a", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"adapter .*a: its base model: model .*gone: no such directory"):
        load_critic(tmp_path / "a")
    edit(tmp_path / "a", base_model_name_or_path=str(tmp_path / "a"))
    with pytest.raises(ModelError, match="is its own base"):
        load_critic(tmp_path / "a")
