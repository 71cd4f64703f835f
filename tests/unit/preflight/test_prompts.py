"""Prompts and chat templates are checked before any process starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError, DataError, ServiceFailed
from quartet.preflight.checking_process import checking_process
from quartet.preflight.prompts import check_prompts
from tests.preflight_workers import run_here
from tests.unit.preflight.files import check_inputs, config, lines


def test_invalid_prompts_are_refused(models: Path) -> None:
    (models / "prompts.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: not JSON"):
        check_inputs(config(models))


def test_a_missing_file_is_named_with_its_setting(models: Path) -> None:
    tree = config(models).model_dump()
    tree["data"]["validation"] = models / "absent.jsonl"
    with pytest.raises(DataError, match=rf"^data\.validation {models}/absent\.jsonl: cannot be read \(No such file"):
        check_inputs(parse_config(tree, "test"))


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
        DataError,
        match=rf"validation\.jsonl:2: messages needs a chat template, but the tokenizer of {models}/policy has none",
    ):
        check_inputs(with_validation(models, MESSAGES))


def test_prompts_of_messages_are_counted(models: Path) -> None:
    (models / "policy/chat_template.jinja").write_text(TEMPLATE)
    assert f"data.validation {models}/validation.jsonl: 2 prompts, 1 of them messages" in check_inputs(
        with_validation(models, MESSAGES)
    )


def test_what_only_a_chat_template_gets_is_warned_of_if_no_prompt_is_messages(models: Path) -> None:
    (models / "policy/chat_template.jinja").write_text(TEMPLATE)
    settings = "data.tools, data.chat_template_kwargs"

    def warnings(tree: dict[str, Any], text: str, **sections: Any) -> list[str]:
        data = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
        (models / "prompts.jsonl").write_text(text)
        changed = parse_config({**tree, "data": {**tree["data"], **data}, **sections}, "test")
        return [line for line in lines(check_prompts(changed, print)) if "not used" in line]

    tree = config(models).model_dump()
    assert warnings(tree, '{"text": "a"}\n' * 2) == [
        f"warning: {settings}: not used: they are for the chat template, and no prompt is a list of messages"
    ]
    [note] = warnings(tree, MESSAGES)
    assert note.startswith("warning: data.prompts: chat_template_kwargs enable_thinking: not used: the template of")
    environment = {"class_name": "a:B", "observations": "chat"}
    turns = {**tree["rollout"], "max_turns": 2}
    assert warnings(tree, '{"text": "a"}\n' * 2, environment=environment, rollout=turns) == []


def test_a_chat_template_that_refuses_a_line_is_reported_with_the_line(models: Path) -> None:
    (models / "policy/chat_template.jinja").write_text(TEMPLATE)
    refused = MESSAGES * 300 + '{"prompt": [{"role": "tool", "content": "a"}]}\n'
    tree = with_validation(models, refused).model_dump()
    tree["evaluation"]["max_prompts"] = 1000
    with pytest.raises(
        DataError, match=r":601: the chat template of .*policy refuses the messages of prompt: no tools"
    ):
        check_inputs(parse_config(tree, "test"))


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


@pytest.mark.usefixtures("real_processes")  # huggingface_hub reads the variables when it is imported.
def test_prompts_that_do_not_fit_a_model_of_the_hub_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = models / "hub/models--owner--policy"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    snapshot = (models / "policy").rename(repository / "snapshots" / ("a" * 40))
    monkeypatch.setenv("HF_HUB_CACHE", str(models / "hub"))
    monkeypatch.setenv("QUARTET_CACHE", str(models / "cache"))
    tree = config(models).model_dump()
    tree["actor"]["model"] = "owner/policy"
    tree["rollout"]["max_response_tokens"] = 6
    lines(check_prompts(parse_config(tree, "test"), print))
    # The first process has read the tokenizer of the hub. The next ones would read the same.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(models / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    run_here(monkeypatch)
    description = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**description, "max_position_embeddings": 6}))
    with pytest.raises(ConfigError, match=r"exceeds the 6 positions of \w+\.model owner/policy"):
        lines(check_prompts(parse_config(tree, "test"), print))
    (snapshot / "config.json").write_text(json.dumps({**description, "vocab_size": 1}))
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: token id 1; the policy's vocabulary is 0\.\.0"):
        lines(check_prompts(parse_config(tree, "test"), print))


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
        return checking_process("quartet.system.child_processes", str(os.getpid()), "sh", "-c", command)

    monkeypatch.setenv("QUARTET_CACHE", "")
    monkeypatch.setattr("quartet.preflight.prompts.checking_process", dying)
    with pytest.raises(ServiceFailed, match=rf"^data\.prompts: the process that tokenizes the prompts {problem}"):
        check_inputs(config(models))


@pytest.mark.usefixtures("real_processes")
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
    assert lines(check_prompts(parse_config(tree, "test"), print)) == [
        f"data.prompts {models}/prompts.jsonl: 2 prompts",
        "data.prompts: they are tokenized when the run starts: the tokenizer is not on this machine",
    ]
