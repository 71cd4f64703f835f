"""Comparison of what a checkpoint says with what it holds, with and without reading the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import structlog
import torch
from transformers import GPTJConfig, GPTJForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.models.weights.loading import META, load_causal_lm, load_critic, load_reward_model
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

Tensors = dict[str, torch.Tensor]


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, change: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file({name: value.clone() for name, value in tensors.items()}, path, {"format": "pt"})


def shards(directory: Path) -> None:
    """Replace the weights by three shards and their index, as save_pretrained writes them."""
    (directory / "model.safetensors").unlink()
    tiny.causal("llama").save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2


def a_bias_that_the_class_lacks(directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))


def a_norm_that_the_class_lacks(directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}))


def more_layers_than_stated(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=1)


def fewer_layers_than_stated(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=3)


def another_vocabulary_than_stated(directory: Path) -> None:
    edit_config(directory, vocab_size=tiny.VOCABULARY + 3)


def tied_with_two_values(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=True)


def tie_with_another_type(tensors: Tensors) -> None:
    """Hold the embeddings twice, in float16 and float32, with equal values."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].half()
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].float()


def untied_without_a_head(directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))


def a_shard_missing(directory: Path) -> None:
    shards(directory)
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


def an_older_file_beside_an_index(directory: Path) -> None:
    old = (directory / "model.safetensors").read_bytes()
    shards(directory)
    (directory / "model.safetensors").write_bytes(old)


def an_index_of_another_save(directory: Path) -> None:
    shards(directory)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = max(content["weight_map"].values())
    content["weight_map"]["model.norm.weight"] = min(content["weight_map"].values())
    index.write_text(json.dumps(content))


def an_index_out_of_its_directory(directory: Path) -> None:
    shards(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


def a_tensor_in_two_shards(directory: Path) -> None:
    shards(directory)
    first, second = sorted(directory.glob("model-*.safetensors"))[:2]
    tensors = safetensors.torch.load_file(first) | safetensors.torch.load_file(second)
    safetensors.torch.save_file(tensors, second, {"format": "pt"})


def files_of_a_distributed_checkpoint(directory: Path) -> None:
    (directory / "shard-00001-model-00001-of-00001.safetensors").write_bytes(
        (directory / "model.safetensors").read_bytes()
    )


def other_weights_named_in_the_config(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    edit_config(directory, transformers_weights="other.safetensors")


def only_files_with_another_name(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")


def quantised_values_without_a_quantization_config(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: (tensors[name] * 100).to(torch.int8)}))


def float8_values_without_a_quantization_config(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


@pytest.mark.parametrize("device", [META, "cpu"])
@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (
            a_bias_that_the_class_lacks,
            r"1 tensors .* no place in LlamaForCausalLM .*'model\.layers\.0\.self_attn\.q_proj",
        ),
        (a_norm_that_the_class_lacks, r"no place .*'model\.layers\.1\.self_attn\.q_norm\.weight'"),
        (more_layers_than_stated, r"9 tensors .* no place .*'model\.layers\.1\.input_layernorm\.weight'"),
        (
            fewer_layers_than_stated,
            r"9 weights .* missing .*'model\.layers\.2\.input_layernorm\.weight'; they would start",
        ),
        (another_vocabulary_than_stated, r"another shape .*'lm_head\.weight': \[\d+, 32\], expected \[\d+, 32\]"),
        (tied_with_two_values, r"ties lm_head\.weight to model\.embed_tokens\.weight .* different values"),
        (untied_without_a_head, r"'lm_head\.weight'; .* set tie_word_embeddings true in config\.json if"),
        (
            a_shard_missing,
            r"1 of \d weight files that model\.safetensors\.index\.json names are missing, the first model-0",
        ),
        (an_older_file_beside_an_index, r"contains model\.safetensors, and .* transformers reads the first"),
        (an_index_of_another_save, r"says that tensor .* which does not contain it; the files are of different saves"),
        (an_index_out_of_its_directory, r"is not the index of safetensors files in its directory"),
        (a_tensor_in_two_shards, r"tensor .* is in model-00001.* and in model-00002"),
        (files_of_a_distributed_checkpoint, r"contains files of torch\.distributed\.checkpoint"),
        (other_weights_named_in_the_config, r"transformers_weights: 'other\.safetensors'"),
        (quantised_values_without_a_quantization_config, r"1 weights have types .*up_proj\.weight' of I8, .* bfloat16"),
        (float8_values_without_a_quantization_config, r"1 weights have types .*up_proj\.weight' of F8_E4M3, "),
        (only_files_with_another_name, r"contains neither .*, but consolidated\.safetensors"),
    ],
)
def test_a_checkpoint_that_holds_something_else_than_it_says_is_refused(
    breaking: Callable[[Path], None], words: str, device: str, tmp_path: Path
) -> None:
    directory = Path(tiny.saved(tiny.causal("llama"), tmp_path / "m"))
    breaking(directory)
    with pytest.raises(ModelError, match=rf"^model {directory}: .*{words}"):
        load_causal_lm(directory, device=device)


@pytest.mark.parametrize("device", [META, "cpu"])
def test_what_other_tools_leave_in_a_checkpoint_is_no_contradiction(device: str, tmp_path: Path) -> None:
    directory = Path(tiny.saved(tiny.causal("llama"), tmp_path / "m"))
    edit_weights(directory, lambda all: all.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    tied = Path(tiny.saved(tiny.causal("llama", tie_word_embeddings=True), tmp_path / "tied"))
    edit_weights(tied, lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"]}))
    other_type = Path(tiny.saved(tiny.causal("llama", tie_word_embeddings=True), tmp_path / "other-type"))
    edit_weights(other_type, tie_with_another_type)
    sharded = Path(tiny.saved(tiny.causal("llama"), tmp_path / "sharded"))
    shards(sharded)
    with structlog.testing.capture_logs() as logs:
        for model in (directory, tied, other_type, sharded):
            load_causal_lm(model, device=device)
        load_critic(directory, device=device)
    assert not logs


@pytest.mark.parametrize("device", [META, "cpu"])
def test_masks_that_earlier_versions_saved_are_no_contradiction(device: str, tmp_path: Path) -> None:
    mask, score = torch.ones(1, 1, 8, 8), torch.tensor(-1e9)
    size = {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": 32}
    neo = GPTNeoConfig(**size, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    gpt_j = GPTJConfig(vocab_size=tiny.VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32, rotary_dim=4)
    models = {"attn.attention": GPTNeoForCausalLM(neo), "attn": GPTJForCausalLM(gpt_j)}
    with structlog.testing.capture_logs() as logs:
        for name, model in models.items():
            directory = Path(tiny.saved(model, tmp_path / name))
            added = {f"transformer.h.0.{name}.bias": mask, f"transformer.h.0.{name}.masked_bias": score}
            edit_weights(directory, lambda all, added=added: all.update(added))
            load_causal_lm(directory, device=device)
    assert not logs


@pytest.mark.parametrize("device", [META, "cpu"])
def test_tensors_of_another_head_are_not_used_with_a_warning(device: str, tmp_path: Path) -> None:
    directory = Path(tiny.saved(tiny.classifier("llama"), tmp_path / "m"))
    edit_weights(
        directory, lambda all: all.update({"lm_head.weight": torch.ones(4, 32), "v_head.weight": torch.ones(1)})
    )
    with structlog.testing.capture_logs() as logs:
        load_reward_model(directory, device=device)
    (line,) = (each["event"] for each in logs)
    assert line == (
        f"model {directory}: the files hold lm_head.weight and 1 more, which LlamaForSequenceClassification does not have; "
        "not used"
    )


def test_an_adapter_of_another_model_is_refused_without_reading_weights(tmp_path: Path) -> None:
    base = str(tiny.saved(tiny.causal("llama"), tmp_path / "base"))
    (made := tmp_path / "adapter").mkdir()
    add_adapter(load_causal_lm(base), base, LoraConfig(rank=4, alpha=8.0), 0).snapshot()(made)
    load_causal_lm(made, device=META)
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**config, "r": 2}))
    with pytest.raises(ModelError, match=r"adapter .* has shape .*, the model expects"):
        load_causal_lm(made, device=META)
    (made / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(ModelError, match="has too many: "):
        load_causal_lm(made, device=META)
