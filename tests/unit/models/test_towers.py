"""Multimodal checkpoints: their language model is trained, and everything else is exported as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.contract.generation import SamplingParameters
from quartet.errors import ModelError
from quartet.model_files.weight_files import INDEX_FILE, read_headers
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.host_tensors import named_weights
from quartet.models.weights.loading import META, load_causal_lm, load_critic, snapshot_model
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import write_model
from tests.unit.models import multimodal, tiny, updates

BATCH = tiny.batch([3, 1, 5], [4, 6, 3])
PROCESSOR = '{"processor_class": "Of images"}'


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    tiny.saved(multimodal.model(kind).to(dtype), folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    return folder


def plain(directory: Path) -> Any:
    return transformers.AutoModelForMultimodalLM.from_pretrained(directory).eval()


@torch.no_grad()
def plain_log_probs(model: Any) -> torch.Tensor:
    """Return the log-probs of the response tokens of each sequence alone."""
    results = []
    for ids, prompt in zip(BATCH.sequences(), BATCH.prompt_lengths.tolist(), strict=True):
        tokens = torch.tensor(ids.tolist())
        log_probs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        results.append(log_probs[:-1].gather(1, tokens[1:, None])[prompt - 1 :, 0])
    return torch.cat(results)


def tensors(directory: Path) -> dict[str, bytes]:
    """Return type and bytes of each tensor in the files of a checkpoint."""
    return {
        name: entry.dtype.encode() + path.read_bytes()[entry.start : entry.end]
        for name, (path, entry) in read_headers(directory).items()
    }


def config(directory: Path) -> dict[str, Any]:
    """Return config.json without types, which are those in which the language model is computed."""
    content: dict[str, Any] = json.loads(
        (directory / "config.json").read_text(),
        object_hook=lambda entry: {name: value for name, value in entry.items() if name != "dtype"},
    )
    return content


def is_tower(name: str) -> bool:
    return any(part in name for part in ("visual", "vision", "audio", "projector", "mtp"))


# Images in the vocabulary, a hybrid language model, and sound. The other kinds have the layout of the first.
DISTINCT = ("gemma3", "qwen3_5", "qwen2_audio")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DISTINCT else pytest.mark.slow) for kind in multimodal.KINDS]
)
def test_an_update_changes_the_language_model_only_and_the_export_is_complete(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "source")
    model = load_causal_lm(str(source))
    log_probs = torch.from_numpy(response_log_probs(model, BATCH, 1.0, 1000))
    assert (log_probs - plain_log_probs(plain(source))).abs().max() < 1e-5
    assert all(not is_tower(name) for name, value in model.named_parameters() if value.requires_grad)
    optimizer = create_optimizer(model, 0.01, weight_decay=0.1)
    update_policy(model, optimizer, updates.experience(model), updates.settings(), updates.LOSS, 1000)
    write_model(tmp_path / "export", snapshot_model(model))

    before, after = tensors(source), tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if value != after[name]}
    assert changed
    assert all(not is_tower(name) for name in changed)
    assert [name for name in before.keys() - changed if is_tower(name)]
    assert config(tmp_path / "export") == config(source)
    assert (tmp_path / "export/preprocessor_config.json").read_text() == PROCESSOR
    exported = plain_log_probs(plain(tmp_path / "export"))
    assert (exported - torch.from_numpy(response_log_probs(model, BATCH, 1.0, 1000))).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_generation_of_text_is_that_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "source")
    engine = TorchEngine(load_causal_lm(str(source)), frozenset([tiny.EOS]), 3)
    model = plain(source)
    for trajectory in engine.trajectories(tiny.requests(5), SamplingParameters(8, temperature=0.0), 0):
        prompt = torch.tensor([trajectory.prompt_ids.tolist()])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert trajectory.response_ids.tolist() == ids[0, prompt.shape[1] :].tolist()


def test_towers_are_neither_in_memory_nor_sent_to_generators(tmp_path: Path) -> None:
    model = load_causal_lm(str(saved("qwen2_5_vl", tmp_path / "m")))
    assert all(not is_tower(name) for name in model.state_dict())
    assert all(not is_tower(name) for name in named_weights(model))


def test_a_tower_that_the_text_pass_reads_is_frozen(tmp_path: Path) -> None:
    model = load_causal_lm(str(saved("qwen2_audio", tmp_path / "m")))
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert frozen
    assert all(name.startswith("model.audio_tower.") for name in frozen)
    adapter = add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0))
    assert len(list(adapter.linear_layers())) == 2 * 7


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_audio"])
def test_towers_keep_their_type_in_the_files(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "source")
    write_model(tmp_path / "export", snapshot_model(load_causal_lm(str(source), "bfloat16")))
    before, after = tensors(source), tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    assert all(after[name].startswith(b"F32" if is_tower(name) else b"BF16") for name in after)
    assert all(after[name] == value for name, value in before.items() if is_tower(name))


def test_a_restored_checkpoint_may_be_deleted_before_the_next_save(tmp_path: Path) -> None:
    source = saved("gemma3", tmp_path / "source")
    before = tensors(source)
    write_model(tmp_path / "checkpoint", snapshot_model(load_causal_lm(str(source))))
    shutil.rmtree(source)
    restored = load_causal_lm(str(tmp_path / "checkpoint"))
    shutil.rmtree(tmp_path / "checkpoint")
    write_model(tmp_path / "export", snapshot_model(restored))
    assert tensors(tmp_path / "export") == before
    assert (tmp_path / "export/preprocessor_config.json").read_text() == PROCESSOR


def test_a_model_in_several_files_is_exported_with_its_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multimodal.model("mistral3").save_pretrained(tmp_path / "source", max_shard_size="20KB")
    model = load_causal_lm(str(tmp_path / "source"))
    save = type(model).save_pretrained
    monkeypatch.setattr(type(model), "save_pretrained", lambda *a, **b: save(*a, **b, max_shard_size="20KB"))
    write_model(tmp_path / "export", snapshot_model(model))
    assert tensors(tmp_path / "export") == tensors(tmp_path / "source")
    index = json.loads((tmp_path / "export" / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(len(value) - 3 for value in tensors(tmp_path / "source").values())
    plain(tmp_path / "export")


def test_tensors_that_transformers_ignores_are_exported_unchanged(tmp_path: Path) -> None:
    source = saved("qwen3_5", tmp_path / "source")
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights["mtp.layers.0.input_layernorm.weight"] = torch.arange(4.0)
    safetensors.torch.save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    write_model(tmp_path / "export", snapshot_model(load_causal_lm(str(source))))
    assert tensors(tmp_path / "export") == tensors(source)


def test_a_merged_adapter_is_exported_with_the_towers(tmp_path: Path) -> None:
    source = saved("qwen3_5", tmp_path / "source")
    model = load_causal_lm(str(source))
    adapter = add_adapter(model, str(source), LoraConfig(rank=2, alpha=4.0))
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    write_model(tmp_path / "adapter", adapter.snapshot())
    write_model(tmp_path / "merged", snapshot_model(model, adapter))
    before, after = tensors(source), tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(not is_tower(name) for name, value in before.items() if value != after[name])
    log_probs = plain_log_probs(plain(tmp_path / "merged"))
    assert (log_probs - torch.from_numpy(response_log_probs(model, BATCH, 1.0, 1000))).abs().max() < 1e-4
    # The adapter names layers of the published model.
    names = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    reloaded = load_causal_lm(tmp_path / "adapter")
    write_model(tmp_path / "again", snapshot_model(reloaded))
    assert tensors(tmp_path / "again") == after


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_a_critic_is_the_language_model_with_a_head(kind: str, tmp_path: Path) -> None:
    critic = load_critic(str(saved(kind, tmp_path / "source")))
    critic.head.weight.data.normal_()
    write_model(tmp_path / "critic", critic.snapshot())
    assert not [name for name in tensors(tmp_path / "critic") if "vision" in name or "visual" in name]
    again = load_critic(str(tmp_path / "critic"))
    ids = torch.arange(2, 9)[None]
    keep = torch.ones_like(ids, dtype=torch.bool)
    assert torch.equal(critic(ids, keep), again(ids, keep))
    load_critic(str(tmp_path / "critic"), device=META)


def test_the_check_compares_the_language_model_with_the_files(tmp_path: Path) -> None:
    source = saved("qwen2_5_vl", tmp_path / "source")
    load_causal_lm(str(source), device=META)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    towers = {name: value for name, value in weights.items() if not is_tower(name)}
    del towers["model.norm.weight"]
    safetensors.torch.save_file(towers, source / "model.safetensors", metadata={"format": "pt"})
    for device in (META, "cpu"):
        with pytest.raises(ModelError, match=r"1 weights of .* missing .* 'model.language_model.norm.weight'"):
            load_causal_lm(str(source), device=device)


@pytest.mark.parametrize("device", [META, "cpu"])
def test_a_model_that_computes_nothing_without_images_is_refused(device: str, tmp_path: Path) -> None:
    config = transformers.Blip2Config(
        text_config={"model_type": "opt", "vocab_size": 61, "num_hidden_layers": 1, "hidden_size": 32, "ffn_dim": 32}
        | {"num_attention_heads": 2, "word_embed_proj_dim": 32},
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        qformer_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        | {"encoder_hidden_size": 16},
    )
    transformers.Blip2ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Blip2For.* does not compute text alone: .*pixel_values.*; give a causal"):
        load_causal_lm(str(tmp_path), device=device)
