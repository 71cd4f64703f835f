"""Checkpoints and tokenizers are checked before any process starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from quartet.config.loading import parse_config
from quartet.errors import ConfigError, ModelError
from quartet.model_files.hub_models import looks_local
from quartet.model_files.tokenizer_check import first_difference
from tests.unit.preflight.files import check_inputs, config


@pytest.mark.parametrize("labels", [{"id2label": {"0": "bad", "1": "good"}}, {"num_labels": 3}, {}])
def test_a_reward_model_with_several_outputs_is_refused(labels: dict[str, Any], models: Path) -> None:
    description = {"architectures": ["LlamaForSequenceClassification"], **labels}
    (models / "reward" / "config.json").write_text(json.dumps(description))
    outputs = len(labels.get("id2label", ())) or labels.get("num_labels", 2)
    with pytest.raises(ModelError, match=rf"^reward\.model .*: a classifier with {outputs} outputs; .*num_labels=1"):
        check_inputs(config(models))


def test_a_reward_model_whose_config_states_no_labels_is_told_how_to_state_one(models: Path) -> None:
    path = models / "reward" / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelError, match=r"config\.json does not say so: add ") as refused:
        check_inputs(config(models))
    assert '"id2label": {"0": "LABEL_0"}' in str(refused.value)
    path.write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}))
    check_inputs(config(models))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_is_a_reference_of_git_lfs_is_named(name: str, models: Path) -> None:
    (models / "policy" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n")
    with pytest.raises(ModelError, match=rf"actor\.model .*{name}.* a reference of Git LFS.*git lfs pull"):
        check_inputs(config(models))


@pytest.mark.usefixtures("real_processes")
@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_loaded_is_refused_without_transformers_in_this_process(models: Path) -> None:
    (models / "policy/tokenizer.json").write_text("{}")
    before = set(sys.modules)
    with pytest.raises(ModelError, match=r"policy: the tokenizer cannot be used: "):
        check_inputs(config(models))
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("transformers", "torch")}


def test_a_missing_model_is_reported_with_its_role(models: Path) -> None:
    (models / "reward/config.json").unlink()
    (models / "reward/model.safetensors").unlink()
    (models / "reward/tokenizer.json").unlink()
    (models / "reward/tokenizer_config.json").unlink()
    (models / "reward").rmdir()
    with pytest.raises(
        ModelError, match=rf"reward\.model {models}/reward: no such directory; expected the directory of a Hugging Face"
    ):
        check_inputs(config(models))


@pytest.mark.parametrize(
    ("file", "contents", "expected"),
    [
        ("config.json", None, "policy: config.json cannot be read (No such file or directory)"),
        ("config.json", "{", ": config.json is not JSON"),
        ("config.json", "[]", ": config.json is not a JSON object"),
        ("model.safetensors", None, "contains no safetensors files; save the model with save_pretrained"),
        ("tokenizer.json", None, "its tokenizer files are missing; expected tokenizer.json, or another vocabulary"),
    ],
)
def test_a_broken_checkpoint_is_reported(file: str, contents: str | None, expected: str, models: Path) -> None:
    if contents is None:
        (models / "policy" / file).unlink()
    else:
        (models / "policy" / file).write_text(contents)
    with pytest.raises(ModelError) as refused:
        check_inputs(config(models))
    assert str(refused.value).startswith(f"actor.model {models}/policy")
    assert expected in str(refused.value)


def test_a_file_instead_of_a_checkpoint_is_refused(models: Path) -> None:
    tree = config(models).model_dump()
    tree["actor"]["model"] = str(models / "prompts.jsonl")
    with pytest.raises(ModelError, match=r"prompts\.jsonl: a file; expected the directory of a Hugging Face model"):
        check_inputs(parse_config(tree, "test"))


def test_the_model_of_a_remote_service_is_not_checked(models: Path) -> None:
    (models / "policy/config.json").unlink()
    remote = {"address": "far:7001"}
    notes = check_inputs(config(models, actor=remote, reference=remote))
    assert [note.split()[0] for note in notes] == ["data.prompts", "reward.model", "critic.model"]


@pytest.mark.parametrize(
    ("model", "local"),
    [("gpt2", False), ("owner/name", False), ("./gpt2", True), ("/models/a", True), ("~/a", True), ("a/b/c", True)],
)
def test_paths_are_distinguished_from_hub_ids(model: str, local: bool) -> None:
    assert looks_local(model) is local


def test_a_hub_id_is_looked_up(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    tree = config(models).model_dump()
    tree["actor"]["model"] = "no-such-owner/no-such-model"
    with pytest.raises(ModelError, match=r"^actor\.model no-such-owner/no-such-model: .* not in the local cache"):
        check_inputs(parse_config(tree, "test"))


@pytest.mark.parametrize(
    ("vocabulary", "difference"),
    [
        ({"a": 0, "c": 1}, "token id 1 is 'c', expected 'b'"),
        ([["a", -1.0], ["c", -2.0]], "token id 1 is 'c', expected 'b'"),
        ({"a": 0, "b": 1, "c": 2}, "token id 2 is 'c', expected no such id"),
        ({"a": 0}, "token id 1 is missing, expected 'b'"),
        ({"a": 0, "b": 1, "<pad>": 2}, ""),
    ],
)
def test_the_first_token_that_differs_between_two_tokenizers_is_named(
    tmp_path: Path, vocabulary: Any, difference: str
) -> None:
    for name, content in (("policy", {"a": 0, "b": 1}), ("reward", vocabulary)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": content}}))
        # transformers adds this token while it loads the tokenizer.
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    assert first_difference(tmp_path / "policy", tmp_path / "reward") == difference


def test_added_tokens_count_in_the_comparison_of_tokenizers(models: Path) -> None:
    for name, token in (("policy", "<eos>"), ("reward", "<end>")):
        tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": token}]}
        (models / name / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(
        ModelError, match=r"reward\.model .* of actor\.model .*: token id 1 is '<end>', expected '<eos>'"
    ):
        check_inputs(config(models))


def test_the_base_model_of_an_adapter_is_checked(models: Path) -> None:
    adapter = models / "adapter"
    adapter.mkdir()
    description = {"base_model_name_or_path": str(models / "policy"), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(description))
    tree = config(models).model_dump()
    tree["actor"]["model"] = str(adapter)
    notes = check_inputs(parse_config(tree, "test"))
    assert f"actor.model {adapter}: LoRA adapter on {models / 'policy'}, LlamaForCausalLM" in notes
    for change, message in (
        ({"base_model_name_or_path": str(models / "absent")}, "its base model .*absent: no such directory"),
        ({"peft_type": "IA3"}, "says peft_type 'IA3'; expected LORA"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(description | change))
        with pytest.raises(ModelError, match=rf"actor\.model .*{message}"):
            check_inputs(parse_config(tree, "test"))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"actor\.model .*adapter_config\.json cannot be read"):
        check_inputs(parse_config(tree, "test"))


def test_the_architecture_must_fit_the_role(models: Path) -> None:
    for names in ([], ["LlamaModel"], ["LlamaForTokenClassification"], "LlamaForCausalLM"):
        (models / "policy" / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": names}))
        with pytest.raises(
            ModelError, match=r"actor\.model .*(expected a causal language model|expected a list of names)"
        ):
            check_inputs(config(models))


def test_an_encoder_as_the_reward_model_cannot_start_the_critic(models: Path) -> None:
    description = {
        "model_type": "roberta",
        "architectures": ["RobertaForSequenceClassification"],
        "id2label": {"0": "a"},
    }
    (models / "reward" / "config.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match=r"critic\.model .*an encoder .*set critic\.model to a causal one"):
        check_inputs(config(models))
    tree = config(models).model_dump()
    tree["critic"]["model"] = str(models / "policy")
    check_inputs(parse_config(tree, "test"))


def test_a_truncated_weight_file_is_refused(models: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = models / "policy" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelError, match=r"actor\.model .*model\.safetensors has \d+ bytes, its header says"):
        check_inputs(config(models))
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="not a safetensors file, or damaged"):
        check_inputs(config(models))


def test_every_model_of_an_ensemble_is_checked(models: Path) -> None:
    tree = config(models).model_dump()
    parts = [{"name": "tone", "model": str(models / "reward")}, {"name": "other", "model": str(models / "absent")}]
    tree["reward"] = {"source": "ensemble", "parts": parts}
    with pytest.raises(ModelError, match=r"reward\.parts\.other\.model .*absent: no such directory"):
        check_inputs(parse_config(tree, "test"))


def test_an_adapter_is_refused_as_a_reward_model(models: Path) -> None:
    adapter = models / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(models / "policy"), "peft_type": "LORA"})
    )
    message = r"adapter: a LoRA adapter on .*policy; expected a sequence classifier with one output: merge the adapter"
    parts = [{"name": "tone", "model": str(adapter)}]
    rewards = {"model": {"model": str(adapter)}, "parts.tone.model": {"source": "ensemble", "parts": parts}}
    for key, reward in rewards.items():
        tree = config(models).model_dump()
        tree["reward"] = reward
        with pytest.raises(ModelError, match=rf"reward\.{key} .*{message}"):
            check_inputs(parse_config(tree, "test"))
    tree["reward"], tree["critic"]["model"] = {"model": str(models / "reward")}, str(adapter)
    assert f"critic.model {adapter}: LoRA adapter on {models / 'policy'}, LlamaForCausalLM" in check_inputs(
        parse_config(tree, "test")
    )


@pytest.mark.parametrize(
    ("generation", "token", "warning"),
    [
        ({}, "?", None),
        ({"eos_token_id": -1}, "?", "generation_config.json: eos_token_id -1: ignored, because the token ids"),
        ({"eos_token_id": [1, 5]}, "?", "eos_token_id 5: ignored, because the token ids of the model are 0..4"),
        ({}, None, "no stop token, so every response is as long as rollout.max_response_tokens allows"),
    ],
)
def test_stop_tokens_that_never_end_a_response_are_warned_of(
    generation: dict[str, Any], token: str | None, warning: str | None, models: Path
) -> None:
    directory = models / "policy"
    for name, content in (
        ("config.json", {**json.loads((directory / "config.json").read_text()), "vocab_size": 5}),
        ("generation_config.json", generation),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}),
    ):
        (directory / name).write_text(json.dumps(content))
    checked = config(models)
    warnings = [note for note in check_inputs(checked) if note.startswith("warning: ")]
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert warnings[0].startswith(f"warning: actor.model {directory}: ")
        assert warning in warnings[0]
    stopping = checked.model_copy(update={"rollout": checked.rollout.model_copy(update={"stop_strings": ("b",)})})
    if token is None:
        assert not [note for note in check_inputs(stopping) if note.startswith("warning: ")]


def test_router_replay_needs_a_model_with_experts(models: Path) -> None:
    checked = config(models)
    replaying = checked.model_copy(update={"rollout": checked.rollout.model_copy(update={"router_replay": True})})
    with pytest.raises(
        ConfigError, match=r"^rollout\.router_replay: actor\.model .*policy has no experts, .* false, or"
    ):
        check_inputs(replaying)
    directory = models / "policy"
    description = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**description, "text_config": {"num_experts": 8}}))
    check_inputs(replaying)


def test_a_stop_token_that_is_no_id_is_refused(models: Path) -> None:
    (models / "policy/generation_config.json").write_text('{"eos_token_id": [[1]]}')
    with pytest.raises(
        ModelError, match=r"^actor\.model .*policy: generation_config\.json: eos_token_id \[\[1\]\]: expected"
    ):
        check_inputs(config(models))
