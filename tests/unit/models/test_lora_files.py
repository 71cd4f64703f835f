"""LoRA files: merged models and separate adapters, and errors for unreadable ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.models.training.optimizer import load_optimizer
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.unit.models import tiny
from tests.unit.models.adapters import ALPHA, IDS, RANK, adapted, edit, files, learn, optimizer_of, same, snapshot
from tests.unit.models.saving import save_adapter, save_optimizer, save_policy

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_merged_export_is_a_plain_model_and_does_not_change_the_trained_one(kind: str, tmp_path: Path) -> None:
    model, adapter = adapted(kind)
    learn(model, steps=2)
    logits, state = model(IDS).logits, snapshot(model)
    for name in ("merged", "loaded"):
        save_policy(model, tiny.tokenizer(), tmp_path / name, adapter)
    assert same(model.state_dict(), state)
    assert torch.equal(model(IDS).logits, logits)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.state_dict().keys() == tiny.causal(kind).state_dict().keys()
    assert (plain(IDS).logits - logits).abs().max() < 1e-5
    assert files(tmp_path / "merged") == files(tmp_path / "loaded")
    assert load_tokenizer(tmp_path / "merged")("w5").input_ids == [5]
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_merged_model_in_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model = tiny.causal("qwen2").bfloat16()
    adapter = add_adapter(model, "base", LoraConfig(rank=RANK, alpha=ALPHA))
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
    loaded = peft.PeftModel.from_pretrained(tiny.causal(kind), tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=IDS).logits, model(IDS).logits)


def test_the_adapter_config_has_the_base_model_and_no_local_path(tmp_path: Path) -> None:
    model = load_causal_lm(tiny.saved(tiny.causal("llama"), tmp_path / "secret-place"))
    adapter = add_adapter(model, "owner/model", LoraConfig(rank=4, alpha=8.0))
    save_adapter(adapter, None, tmp_path / "adapter")
    text = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert "secret-place" not in text
    config = json.loads(text)
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == ("owner/model", 4, 8)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["peft_type"], config["task_type"], config["lora_dropout"]) == ("LORA", "CAUSAL_LM", 0.0)


def test_equal_weights_give_equal_bytes_whatever_the_order_of_peft_s_sets(tmp_path: Path) -> None:
    class Backwards(set[str]):
        """A set in another order, as another process with another hash seed has it."""

        def __iter__(self) -> Iterator[str]:
            return reversed(list(super().__iter__()))

    for name in ("here", "there"):
        _, adapter = adapted("llama")
        settings = adapter._peft.peft_config["default"]
        assert isinstance(settings.target_modules, set)
        if name == "there":
            settings.target_modules = Backwards(settings.target_modules)
        save_adapter(adapter, tiny.tokenizer(), tmp_path / name)
    assert files(tmp_path / "here") == files(tmp_path / "there")


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_an_adapter_directory_loads_as_the_merged_model(kind: str, tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal(kind), tmp_path / "base"))
    model = load_causal_lm(base)
    adapter = add_adapter(model, base, LoraConfig(rank=RANK, alpha=ALPHA))
    learn(model, steps=2)
    save_adapter(adapter, tiny.tokenizer(), tmp_path / "adapter")
    save_policy(model, tiny.tokenizer(), tmp_path / "merged", adapter)
    loaded = load_causal_lm(tmp_path / "adapter")
    assert same(loaded.state_dict(), load_causal_lm(tmp_path / "merged").state_dict())
    assert (loaded(IDS).logits - model(IDS).logits).abs().max() < 1e-5
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(hasattr(module, "lora_A") for module in loaded.modules())
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "adapter")) == tokenizer_fingerprint(tiny.tokenizer())


def test_an_adapter_on_an_adapter_loads_as_one_merged_model(tmp_path: Path) -> None:
    model = tiny.causal("gpt2")
    tiny.tokenizer().save_pretrained(tiny.saved(model, tmp_path / "base"))
    below = tmp_path / "base"
    for name in ("first", "second"):
        model = load_causal_lm(below)
        adapter = add_adapter(model, str(below), LoraConfig(rank=RANK, alpha=ALPHA), len(name))
        learn(model)
        save_adapter(adapter, None, tmp_path / name)
        below = tmp_path / name
    assert (load_causal_lm(below)(IDS).logits - model(IDS).logits).abs().max() < 1e-5
    # Neither adapter has a tokenizer.
    assert load_tokenizer(below)("w7").input_ids == [7]


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
    # The pickle is complete and harmless, so only the ban on pickles can refuse it.
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
        (no_base, "has no base_model_name_or_path"),
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
def test_an_unusable_adapter_is_refused_in_one_line_with_its_path(
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


def test_training_from_a_checkpoint_with_optimizer_is_bit_identical(tmp_path: Path) -> None:
    model, adapter = adapted("llama")
    optimizer = learn(model, steps=2)
    save_adapter(adapter, None, tmp_path / "c")
    save_optimizer(optimizer, tmp_path / "c" / "optimizer.safetensors")
    learn(model, optimizer=optimizer)
    loaded, other = adapted("llama", seed=9)
    restored = optimizer_of(loaded)
    other.read(tmp_path / "c")
    load_optimizer(restored, tmp_path / "c" / "optimizer.safetensors")
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in loaded.named_parameters())
    learn(loaded, optimizer=restored)
    assert same(loaded.state_dict(), model.state_dict())


def test_reading_an_adapter_of_another_shape_changes_nothing(tmp_path: Path) -> None:
    save_adapter(adapted("llama", rank=5)[1], None, tmp_path / "wide")
    model, adapter = adapted("llama")
    learn(model)
    state = snapshot(model)
    with pytest.raises(ModelError, match=r"shape \(5, 48\), the model expects \(3, 48\)"):
        adapter.read(tmp_path / "wide")
    assert same(model.state_dict(), state)
