"""Errors that are reported before any process starts."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tokenizers

from quartet.config import Config, load_config, parse_config
from quartet.errors import ConfigError, DataError, ModelError, ServiceFailed
from quartet.hub_models import looks_local
from quartet.preflight import check_inputs, unused_settings
from quartet.preflight.checking_process import checking_process
from quartet.preflight.prompts import check_prompts
from quartet.tokenizer_check import first_difference
from tests.every_case import every_case
from tests.unit.test_child_processes import is_running


def save_tokenizer(directory: Path) -> None:
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate("abcd?")}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    description = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "?"})
    (directory / "tokenizer_config.json").write_text(description)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Create two directories that look like checkpoints, and a prompts file."""
    for name, architecture in (("policy", "LlamaForCausalLM"), ("reward", "LlamaForSequenceClassification")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"architectures": [architecture], "id2label": {"0": "score"}})
        )
        (tmp_path / name / "model.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
        save_tokenizer(tmp_path / name)
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


def test_each_check_is_reported_in_one_line(models: Path) -> None:
    notes = check_inputs(config(models))
    assert notes[0] == f"data.prompts {models}/prompts.jsonl: 2 prompts"
    assert [note.split()[0] for note in notes[1:]] == ["actor.model", "reward.model", "critic.model", "reference.model"]
    assert notes[1].endswith("LlamaForCausalLM")
    assert notes[3].endswith("LlamaForSequenceClassification")


@pytest.mark.parametrize("labels", [{"id2label": {"0": "bad", "1": "good"}}, {"num_labels": 3}, {}])
def test_a_reward_model_with_several_outputs_is_refused(labels: dict[str, Any], models: Path) -> None:
    description = {"architectures": ["LlamaForSequenceClassification"], **labels}
    (models / "reward" / "config.json").write_text(json.dumps(description))
    outputs = len(labels.get("id2label", ())) or labels.get("num_labels", 2)
    with pytest.raises(ModelError, match=rf"^reward\.model .*: a classifier with {outputs} outputs; .*num_labels=1"):
        check_inputs(config(models))


def test_more_devices_than_a_service_can_use_are_refused(models: Path) -> None:
    for role, devices in (("reward", [0, 1]), ("actor", [0, 1]), ("critic", [0, 1, 2, 3])):
        with pytest.raises(
            ConfigError, match=rf"^services\.{role}\.devices .*a model on several GPUs is not supported"
        ):
            check_inputs(config(models, **{role: {"devices": devices}}))
    tree = config(models, actor={"devices": [0, 1]}).model_dump()
    tree["rollout"]["max_off_policy_steps"] = 1
    check_inputs(parse_config(tree, "test"))


def test_an_output_without_its_package_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tree = config(models).model_dump()
    tree["telemetry"]["wandb"] = {"project": "p"}
    with pytest.raises(ConfigError, match=r"^telemetry\.wandb: the package wandb is not installed"):
        check_inputs(parse_config(tree, "test"))


def test_invalid_prompts_are_refused(models: Path) -> None:
    (models / "prompts.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: not JSON"):
        check_inputs(config(models))


def with_validation(models: Path, text: str) -> Config:
    (models / "validation.jsonl").write_text(text)
    tree = config(models).model_dump()
    tree["data"]["validation"] = models / "validation.jsonl"
    return parse_config(tree, "test")


def test_validation_prompts_are_checked(models: Path) -> None:
    assert check_inputs(with_validation(models, '{"text": "a"}\n'))[1] == (
        f"data.validation {models}/validation.jsonl: 1 prompts"
    )
    with pytest.raises(DataError, match=r"validation\.jsonl:2: not JSON"):
        check_inputs(with_validation(models, '{"text": "a"}\nnonsense\n'))


MESSAGES = '{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n'


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %} {{ m.content }}"
    "{% endfor %} d"
)


def test_messages_without_a_chat_template_are_refused(models: Path) -> None:
    with pytest.raises(
        DataError, match=rf"validation\.jsonl:2: messages, but the tokenizer of {models}/policy has no chat"
    ):
        check_inputs(with_validation(models, MESSAGES))


def test_a_chat_template_that_refuses_a_line_is_reported_without_transformers(models: Path) -> None:
    (models / "policy/chat_template.jinja").write_text(TEMPLATE)
    before = set(sys.modules)
    assert f"data.validation {models}/validation.jsonl: 2 prompts, 1 of them messages" in check_inputs(
        with_validation(models, MESSAGES)
    )
    refused = MESSAGES * 300 + '{"prompt": [{"role": "tool", "content": "a"}]}\n'
    tree = with_validation(models, refused).model_dump()
    tree["evaluation"]["max_prompts"] = 1000
    with pytest.raises(DataError, match=r":601: the chat template of .*policy refuses these messages: no tools"):
        check_inputs(parse_config(tree, "test"))
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("transformers", "torch")}


def test_prompts_that_end_with_the_assistant_are_refused_unless_they_are_continued(models: Path) -> None:
    (models / "policy/chat_template.jinja").write_text(TEMPLATE.replace(" d", ""))
    tree = with_validation(models, '{"prompt": [{"role": "assistant", "content": "a"}]}\n').model_dump()
    with pytest.raises(
        DataError, match=r"validation\.jsonl:1: the last message is the assistant's; set data\.continue"
    ):
        check_inputs(parse_config(tree, "test"))
    tree["data"]["continue_final_message"] = True
    check_inputs(parse_config(tree, "test"))


def test_prompts_that_do_not_fit_the_positions_of_a_model_are_refused(models: Path) -> None:
    tree = with_validation(models, '{"text": "a b c"}\n').model_dump()
    tree["rollout"]["max_response_tokens"] = 6
    for name, key in (("policy", "max_position_embeddings"), ("reward", "n_positions")):
        path = models / name / "config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, key: 9}))
        check_inputs(parse_config(tree, "test"))
        path.write_text(json.dumps({**content, key: 8}))
        with pytest.raises(
            ConfigError,
            match=rf"max_response_tokens 6: with the longest prompt of data\.validation, of 3 tokens, exceeds the 8 positions of "
            rf"\w+\.model {models}/{name}; lower it, or data\.max_prompt_tokens",
        ):
            check_inputs(parse_config(tree, "test"))
        path.write_text(json.dumps(content))


def test_prompts_that_do_not_fit_a_model_of_the_hub_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = models / "hub/models--owner--policy"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    snapshot = (models / "policy").rename(repository / "snapshots" / ("a" * 40))
    monkeypatch.setenv("HF_HUB_CACHE", str(models / "hub"))
    tree = config(models).model_dump()
    tree["actor"]["model"] = "owner/policy"
    tree["rollout"]["max_response_tokens"] = 6
    check_prompts(parse_config(tree, "test"), print)
    description = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**description, "max_position_embeddings": 6}))
    with pytest.raises(ConfigError, match=r"exceeds the 6 positions of \w+\.model owner/policy"):
        check_prompts(parse_config(tree, "test"), print)
    (snapshot / "config.json").write_text(json.dumps({**description, "vocab_size": 1}))
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: token id 1; the policy's vocabulary is 0\.\.0"):
        check_prompts(parse_config(tree, "test"), print)


def test_too_many_dropped_prompts_and_unknown_token_ids_are_refused(models: Path) -> None:
    (models / "prompts.jsonl").write_text('{"text": "a b c"}\n' * 2 + '{"text": "a"}\n' * 2)
    tree = config(models).model_dump()
    tree["data"]["max_prompt_tokens"] = 2
    warning = "warning: data.prompts: 2 of 4 prompts are over data.max_prompt_tokens 2 and dropped; raise it, or"
    assert check_inputs(parse_config(tree, "test"))[1].startswith(warning)
    tree["data"]["max_dropped_fraction"] = 0.4
    with pytest.raises(
        DataError, match=r"2 of 4 are over .* more than data\.max_dropped_fraction 0\.4; raise it, or set"
    ):
        check_inputs(parse_config(tree, "test"))
    tree["data"]["truncation"] = "left"
    assert (
        "2 of 4 prompts are over data.max_prompt_tokens 2 and truncated" in check_inputs(parse_config(tree, "test"))[1]
    )
    path = models / "policy/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 2}))
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: token id 2; the policy's vocabulary is 0\.\.1"):
        check_inputs(parse_config(tree, "test"))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("kill -9 $$", r"was killed by SIGKILL; its memory may not suffice"),
        ("exit 3", r"ended with status 3$"),
        ('echo \'{"progress": "1 of 2"}\' > /dev/fd/$0', r"ended with status 0$"),
    ],
)
def test_the_death_of_the_process_that_tokenizes_is_reported(
    command: str, problem: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: Any, **__: Any) -> Any:
        return checking_process("quartet.child_processes", str(os.getpid()), "sh", "-c", command)

    monkeypatch.setenv("QUARTET_CACHE", "")
    monkeypatch.setattr("quartet.preflight.prompts.checking_process", dying)
    with pytest.raises(ServiceFailed, match=rf"^data\.prompts: the process that tokenizes the prompts {problem}"):
        check_inputs(config(models))


@pytest.mark.parametrize(
    ("reason", "error", "problem"),
    [
        ("ModuleNotFoundError('no', name='transformers')", ConfigError, r"transformers is not installed; .*\[train\]"),
        ("ModuleNotFoundError('No module named x', name='x')", ConfigError, "cannot be tokenized: No module named x"),
        ("RuntimeError('no')", ServiceFailed, r"the prompts cannot be tokenized: no \(RuntimeError\)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_reported(
    reason: str, error: type[Exception], problem: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/transformers.py").write_text(f"raise {reason}\n")
    monkeypatch.setenv("QUARTET_CACHE", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    with pytest.raises(error, match=problem):
        check_inputs(config(models))


def test_without_the_tokenizer_the_prompts_are_only_read(models: Path) -> None:
    tree = config(models).model_dump()
    tree["actor"]["model"] = str(models / "absent")
    assert check_prompts(parse_config(tree, "test"), print) == [
        f"data.prompts {models}/prompts.jsonl: 2 prompts",
        "data.prompts: they are tokenized when the run starts: the tokenizer is not on this machine",
    ]


def test_a_tokenizer_that_cannot_be_loaded_is_refused(models: Path) -> None:
    (models / "policy/tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"policy: the tokenizer cannot be used: "):
        check_inputs(config(models))


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
        ("config.json", None, "config.json cannot be read (No such file or directory)"),
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
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
    with pytest.raises(ModelError, match="no such directory"):
        check_inputs(parse_config(tree, "test"))


@pytest.mark.parametrize("key", ["listen", "metrics_listen", "health_listen"])
def test_a_port_in_use_is_reported_with_its_key(models: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"services\.reward\.{key} {address}: cannot listen there"):
            check_inputs(config(models, reward={key: address}))
        check_inputs(config(models, reward={key: address, "address": "far:7001"}))
    check_inputs(config(models, reward={key: address}))


def test_an_address_of_another_machine_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.actor\.listen 192\.0\.2\.1:7000: cannot listen there"):
        check_inputs(config(models, actor={"listen": "192.0.2.1:7000"}))


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


IMPORTED = "raise SystemExit('imported by the check')\n"
OWN = ("single", "package", "open")


@pytest.fixture
def modules(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create modules in the working directory that raise SystemExit when they are imported."""
    files = ("single.py", "package/__init__.py", "package/inner.py", "package/deeper/__init__.py", "open/wide/door.py")
    for name in files:
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_text(IMPORTED)
    monkeypatch.chdir(models)
    return models


def with_function(models: Path, function: str, **services: dict[str, Any]) -> Config:
    tree = config(models, **services).model_dump()
    tree["reward"] = {"source": "function", "function": function}
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    "module",
    [
        "single", "package", "package.inner", "package.deeper", "open.wide.door", "single.made_when_imported",
        "math", "os.path", "numpy.linalg", "quartet.errors",
    ],
)  # fmt: skip
def test_the_module_of_a_function_is_located_and_imported_only_in_another_process(module: str, modules: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError) as refused:
        check_inputs(with_function(modules, f"{module}:f"))
    reason = "imported by the check" if module.split(".")[0] in OWN else f"module {module} has no f"
    assert str(refused.value).startswith(f"reward.function {module}:f: ")
    assert reason in str(refused.value)
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in OWN}


FUNCTIONS = """
import os, subprocess, sys
sys.stdout = sys.stderr
print("a line of the module")
os.environ["QUARTET_OF_THE_USER"]
child = subprocess.Popen(["sleep", "60"])
open("child", "w").write(str(child.pid))
def good(prompt, response, fields): return 1.0
def any_number(*arguments): return 1.0
def judge(prompt, response, initial, fields): return 1.0
def short(prompt): return 1.0
value = 3
class Reward:
    def __call__(self, prompt, response, fields): return 1.0
instance = Reward()
secret = lambda prompt, response, fields=os.environ.get("QUARTET_BUFFER_URL"): 1.0
assert "QUARTET_BUFFER_URL" not in os.environ
"""


@every_case(
    ("function", "message"),
    [
        ("good", ""),
        ("any_number", ""),
        ("instance", ""),
        ("secret", ""),
        ("short", "too many positional arguments, called with 3 arguments: prompt, response, fields"),
        ("judge", "missing a required argument: 'fields', called with 3 arguments"),
        ("goood", "module mine has no goood; did you mean good?"),
        ("value", "is a value of type int, expected a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    function: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(models)
    monkeypatch.setenv("QUARTET_OF_THE_USER", "1")
    monkeypatch.setenv("QUARTET_BUFFER_URL", "redis://:secret@h/0")  # pragma: allowlist secret - an example
    if not message:
        note = f"reward.function mine:{function}: can be imported and accepts 3 arguments"
        assert note in check_inputs(with_function(models, f"mine:{function}"))
        deadline = time.monotonic() + 10
        while is_running(int((models / "child").read_text())):
            assert time.monotonic() < deadline, "a process that the module started still runs"
        return
    with pytest.raises(ConfigError, match=re.escape(f"reward.function mine:{function}: ") + ".*" + re.escape(message)):
        check_inputs(with_function(models, f"mine:{function}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos._exit(3)\n", "its import ends the process"),
        ("import absent_module\n", "cannot be imported from .*: ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_a_module_that_fails_to_import_is_refused(
    text: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "mine.py").write_text(text)
    monkeypatch.chdir(models)
    with pytest.raises(ConfigError, match=f"^reward.function mine:f: {message}"):
        check_inputs(with_function(models, "mine:f"))


def test_a_package_that_hides_a_module_of_the_user_is_reported(modules: Path) -> None:
    (modules / "json").mkdir()
    (modules / "json" / "__init__.py").touch()
    (modules / "json" / "mine.py").touch()
    with pytest.raises(
        ConfigError, match=r"json/__init__\.py hides the module json in this directory: rename that module$"
    ):
        check_inputs(with_function(modules, "json.mine:f"))


@pytest.mark.parametrize(
    "module", ["absent", "package.absent", "package.deeper.absent", "open.absent", "open.wide.shut"]
)
def test_a_function_in_a_missing_module_is_refused(module: str, modules: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_inputs(with_function(modules, f"{module}:f"))
    message = str(refused.value)
    assert message.startswith(f"reward.function {module}:f: no module {module} in {modules} or among the installed")
    assert "PYTHONPATH" in message


def test_functions_of_ensembles_and_judges_are_checked(modules: Path) -> None:
    tree = config(modules).model_dump()
    parts = [{"name": "absent", "source": "function", "function": "absent:f"}]
    with pytest.raises(ConfigError, match=r"^reward\.parts\.absent\.function absent:f: no module absent"):
        check_inputs(parse_config({**tree, "reward": {"source": "ensemble", "parts": parts}}, "test"))
    with pytest.raises(ConfigError, match=r"^evaluation\.judge absent\.judges:f: no module absent\.judges"):
        check_inputs(parse_config({**tree, "evaluation": {"judge": "absent.judges:f"}}, "test"))


def test_the_function_of_a_remote_reward_is_not_checked(modules: Path) -> None:
    check_inputs(with_function(modules, "absent:f", reward={"address": "far:7001"}))


def minimal(models: Path, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"prompts": str(models / "prompts.jsonl")},
        "actor": {"model": str(models / "policy")},
        "reward": {"model": str(models / "reward")},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2},
        **sections,
    }


NO_CRITIC = "algorithm.estimator rloo has no critic"
RLOO = {"estimator": "rloo"}


@pytest.mark.parametrize(
    ("sections", "keys", "reason"),
    [
        ({"critic": {"learning_rate": 1e-4, "optimizer": {"eps": 1e-6}}}, "critic.learning_rate, critic.optimizer.eps",
         NO_CRITIC),
        ({"critic": {"model": "a/b", "schedule": "constant", "final_learning_rate": 0.0}},
         "critic.schedule, critic.final_learning_rate, critic.model", NO_CRITIC),
        ({"algorithm": {**RLOO, "value_clip": 0.3, "gae_lambda": 0.95}}, "algorithm.gae_lambda, algorithm.value_clip",
         NO_CRITIC),
        ({"algorithm": {**RLOO, "critic_warmup_steps": 0}}, "algorithm.critic_warmup_steps", NO_CRITIC),
        ({"services": {"critic": {"num_threads": 2}}}, "services.critic.num_threads", NO_CRITIC),
        ({"guards": {"critic_lost": {"action": "stop"}}}, "guards.critic_lost.action", NO_CRITIC),
        ({"algorithm": {**RLOO, "grpo_normalize_std": False}}, "algorithm.grpo_normalize_std", "algorithm.estimator is rloo"),
        ({"actor": {"model": "a/b", "lora": {}}, "reference": {"dtype": "float32", "micro_batch_tokens": 9}},
         "reference.dtype, reference.micro_batch_tokens", "the actor serves the reference, with its adapter disabled"),
        ({"actor": {"model": "a/b", "lora": {}}, "services": {"reference": {"devices": [1]}}},
         "services.reference.devices", "the actor serves the reference, with its adapter disabled"),
        ({"algorithm": {**RLOO, "kl_controller": {"target": 3.0, "horizon": 10_000.0}}},
         "algorithm.kl_controller.target, algorithm.kl_controller.horizon", "algorithm.kl_controller.kind is fixed"),
        ({"algorithm": {**RLOO, "truncation": {"treatment": "scale", "penalty": 2.0, "scale": 0.1}}},
         "algorithm.truncation.penalty", "algorithm.truncation.treatment is scale"),
        ({"algorithm": {**RLOO, "truncation": {"scale": 0.1}}}, "algorithm.truncation.scale",
         "algorithm.truncation.treatment is keep"),
        ({"actor": {"model": "a/b", "final_learning_rate": 1e-6}}, "actor.final_learning_rate",
         "actor.schedule is constant"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_reported_with_the_reason(
    sections: dict[str, Any], keys: str, reason: str, models: Path
) -> None:
    parsed = parse_config(minimal(models, **{"algorithm": RLOO, **sections}), "test")
    assert unused_settings(parsed) == [f"not used: {keys}: {reason}"]


def test_settings_with_an_effect_are_not_reported(models: Path) -> None:
    sections: dict[str, Any] = {
        "algorithm": {
            "gae_lambda": 0.9, "value_clip": 0.1, "critic_warmup_steps": 1, "kl_controller": {"kind": "simple", "target": 3.0},
            "truncation": {"treatment": "penalty", "penalty": 2.0},
        },
        "actor": {"model": "a/b", "schedule": "linear", "final_learning_rate": 1e-6, "lora": {"rank": 2}},
        "critic": {"learning_rate": 1e-4, "schedule": "cosine", "final_learning_rate": 1e-6},
        "reference": {"model": "a/b", "dtype": "bfloat16"},
        "services": {"critic": {"num_threads": 1}, "reference": {"num_threads": 1}},
        "guards": {"critic_lost": {"action": "stop"}},
    }  # fmt: skip
    assert unused_settings(parse_config(minimal(models, **sections), "test")) == []
    grpo = {
        "algorithm": {
            "estimator": "grpo",
            "grpo_normalize_std": False,
            "truncation": {"treatment": "scale", "scale": 0.1},
        }
    }
    assert unused_settings(parse_config(minimal(models, **grpo), "test")) == []
    critic = {"critic": {"final_learning_rate": 1e-6}}
    assert unused_settings(parse_config(minimal(models, **critic), "test")) == [
        "not used: critic.final_learning_rate: critic.schedule is constant"
    ]


def test_in_a_complete_config_only_values_other_than_the_default_are_reported(models: Path) -> None:
    def resolved(**sections: Any) -> Config:
        (models / "config.yaml").write_text(parse_config(minimal(models, **sections), "test").to_yaml())
        return load_config(models / "config.yaml")

    actor = {"model": str(models / "policy"), "lora": {"rank": 2}}
    assert unused_settings(resolved(algorithm=RLOO, actor=actor)) == []
    parsed = resolved(algorithm={**RLOO, "gae_lambda": 0.9}, critic={"optimizer": {"eps": 1e-6}}, actor=actor)
    assert unused_settings(parsed) == [
        f"not used: critic.optimizer.eps: {NO_CRITIC}",
        f"not used: algorithm.gae_lambda: {NO_CRITIC}",
    ]


def test_the_check_reports_unused_settings_last(models: Path) -> None:
    parsed = parse_config(minimal(models, algorithm=RLOO, critic={"warmup_steps": 3}), "test")
    assert check_inputs(parsed)[-1] == f"not used: critic.warmup_steps: {NO_CRITIC}"
