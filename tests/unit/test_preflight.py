"""What is found wrong before anything is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from quartet.config import Config, parse_config
from quartet.errors import ConfigError, DataError, ModelError
from quartet.preflight import check_inputs, looks_local


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two directories that look like checkpoints, and a prompts file."""
    for name, architecture in (("policy", "LlamaForCausalLM"), ("reward", "LlamaForSequenceClassification")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    return tmp_path


def config(models: Path, **services: dict[str, Any]) -> Config:
    tree = {
        "data": {"prompts": models / "prompts.jsonl"},
        "actor": {"model": str(models / "policy")},
        "reward": {"model": str(models / "reward")},
        "buffer": {"url": "redis://far"},
        "rollout": {"prompts_per_step": 2},
        "services": services,
    }
    return parse_config(tree, "test")


def test_what_is_found_is_said_in_one_line_each(models: Path) -> None:
    notes = check_inputs(config(models))
    assert notes[0] == f"data.prompts {models}/prompts.jsonl: 2 prompts"
    assert [note.split()[0] for note in notes[1:]] == ["actor.model", "reward.model", "critic.model", "reference.model"]
    assert notes[1].endswith("LlamaForCausalLM")
    assert notes[3].endswith("LlamaForSequenceClassification")


def test_bad_prompts_are_found(models: Path) -> None:
    (models / "prompts.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: not JSON"):
        check_inputs(config(models))


def with_validation(models: Path, text: str) -> Config:
    (models / "validation.jsonl").write_text(text)
    tree = config(models).model_dump()
    tree["data"]["validation"] = models / "validation.jsonl"
    return parse_config(tree, "test")


def test_validation_prompts_are_read_too(models: Path) -> None:
    assert check_inputs(with_validation(models, '{"text": "a"}\n'))[1] == (
        f"data.validation {models}/validation.jsonl: 1 prompts"
    )
    with pytest.raises(DataError, match=r"validation\.jsonl:2: not JSON"):
        check_inputs(with_validation(models, '{"text": "a"}\nnonsense\n'))


MESSAGES = '{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n'


def test_messages_for_a_tokenizer_without_a_chat_template_are_found(models: Path) -> None:
    (models / "policy/tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=rf"validation\.jsonl:2: messages, but the tokenizer of actor\.model {models}"):
        check_inputs(with_validation(models, MESSAGES))


@pytest.mark.parametrize(
    ("file", "text"),
    [("chat_template.jinja", ""), ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}')],
)
def test_messages_for_a_tokenizer_with_a_chat_template_are_counted(file: str, text: str, models: Path) -> None:
    (models / "policy/tokenizer_config.json").write_text("{}")
    (models / "policy" / file).write_text(text)
    notes = check_inputs(with_validation(models, MESSAGES))
    assert notes[1].endswith("validation.jsonl: 2 prompts, 1 of them messages")


def test_a_missing_model_is_named_with_its_role(models: Path) -> None:
    (models / "reward/config.json").unlink()
    (models / "reward/model.safetensors").unlink()
    (models / "reward").rmdir()
    with pytest.raises(ModelError, match=rf"reward\.model {models}/reward: no such directory; expected a Hugging Face"):
        check_inputs(config(models))


@pytest.mark.parametrize(
    ("file", "contents", "expected"),
    [
        ("config.json", None, "config.json cannot be read (No such file or directory)"),
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
        ("model.safetensors", None, "no safetensors weights in it; save the model with save_pretrained"),
    ],
)
def test_a_broken_checkpoint_is_named(file: str, contents: str | None, expected: str, models: Path) -> None:
    if contents is None:
        (models / "policy" / file).unlink()
    else:
        (models / "policy" / file).write_text(contents)
    with pytest.raises(ModelError) as refused:
        check_inputs(config(models))
    assert str(refused.value).startswith(f"actor.model {models}/policy")
    assert expected in str(refused.value)


def test_a_file_where_a_checkpoint_should_be_is_refused(models: Path) -> None:
    tree = config(models).model_dump()
    tree["actor"]["model"] = str(models / "prompts.jsonl")
    with pytest.raises(ModelError, match="no such directory"):
        check_inputs(parse_config(tree, "test"))


def test_a_taken_port_is_named_with_its_key(models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"services\.reward\.listen {address}: cannot listen there"):
            check_inputs(config(models, reward={"listen": address}))
    check_inputs(config(models, reward={"listen": address}))


def test_an_address_of_another_machine_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.actor\.listen 192\.0\.2\.1:7000: cannot listen there"):
        check_inputs(config(models, actor={"listen": "192.0.2.1:7000"}))


def test_the_model_of_a_service_elsewhere_is_not_looked_for(models: Path) -> None:
    (models / "policy/config.json").unlink()
    elsewhere = {"address": "far:7001"}
    notes = check_inputs(config(models, actor=elsewhere, reference=elsewhere))
    assert [note.split()[0] for note in notes] == ["data.prompts", "reward.model", "critic.model"]


@pytest.mark.parametrize(
    ("model", "local"),
    [("gpt2", False), ("owner/name", False), ("./gpt2", True), ("/models/a", True), ("~/a", True), ("a/b/c", True)],
)
def test_paths_are_told_from_hub_ids(model: str, local: bool) -> None:
    assert looks_local(model) is local


def test_a_hub_id_is_left_to_the_service(models: Path) -> None:
    tree = config(models).model_dump()
    tree["actor"]["model"] = "no-such-owner/no-such-model"
    notes = check_inputs(parse_config(tree, "test"))
    assert notes[1] == "actor.model no-such-owner/no-such-model: a hub id; it is looked up when the actor starts"


def test_an_adapter_directory_is_a_model_and_its_base_is_named(models: Path) -> None:
    adapter = models / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    tree = config(models).model_dump()
    tree["actor"]["model"] = str(adapter)
    notes = check_inputs(parse_config(tree, "test"))
    assert notes[1] == f"actor.model {adapter}: a LoRA adapter on some/base; it is read when the actor starts"
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"actor\.model .*adapter_config\.json: not JSON"):
        check_inputs(parse_config(tree, "test"))


def test_every_model_of_an_ensemble_is_looked_at(models: Path) -> None:
    tree = config(models).model_dump()
    parts = [{"name": "tone", "model": str(models / "reward")}, {"name": "other", "model": str(models / "absent")}]
    tree["reward"] = {"source": "ensemble", "parts": parts}
    with pytest.raises(ModelError, match=r"reward\.parts\.other\.model .*absent: no such directory"):
        check_inputs(parse_config(tree, "test"))
