"""`quartet generate` explains why nothing was printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quartet.cli.inference import generate as command
from quartet.contract.generation import SamplingParameters
from quartet.data.chat_template import TemplateInputs
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles


@pytest.mark.parametrize(("texts", "is_explained"), [(["", ""], True), (["", "a word"], False)])
def test_empty_responses_are_explained(
    texts: list[str], is_explained: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    completions = [SimpleNamespace(prompt="a prompt", text=text) for text in texts]
    monkeypatch.setattr(command, "complete", lambda *_: completions)
    command.generate("model", ["a prompt"], None, SamplingParameters(4), 2, 0, "cpu", json_lines=False)
    assert ("answers with --chat" in capsys.readouterr().err) == is_explained


@pytest.mark.parametrize(
    ("row", "is_noted"), [({"text": "a"}, True), ({"messages": [{"role": "user", "content": "a"}]}, False)]
)
def test_variables_of_the_chat_template_are_noted_if_all_prompts_are_text(
    row: dict[str, object],
    is_noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(command, "complete", lambda *_: [SimpleNamespace(prompt="a", text="b")])
    for variables, expected in (('{"enable_thinking": false}', is_noted), ("", False)):
        command.generate("model", [], file, SamplingParameters(4), 1, 0, "cpu", False, chat_template_kwargs=variables)
        assert ("note: --chat-template-kwargs is not used" in capsys.readouterr().err) == expected


def test_the_chat_template_gets_what_the_run_of_the_policy_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"prompts": "p.jsonl", "chat_template_kwargs": {"a": 1, "b": 1}, "tools": [{"type": "function"}]}
    run = RunFiles(tmp_path / "run")
    run.root.mkdir()
    run.write_config(json.dumps({"data": data, "actor": {"model": "a"}, "reward": {"model": "b"}}))
    for place in (run.root, run.policy, run.checkpoints / "step-000001"):
        place.mkdir(parents=True, exist_ok=True)
        inputs = command.template_inputs(str(place), '{"b": 2}')
        assert inputs.chat_template_kwargs == {"a": 1, "b": 2}
        assert inputs.tools == [{"type": "function"}]
    monkeypatch.chdir(run.root)
    assert command.template_inputs("owner/model", "").key == TemplateInputs().key
    with pytest.raises(ConfigError, match="--chat-template-kwargs is of type list; expected an object"):
        command.template_inputs("owner/model", "[1]")


def test_a_run_whose_config_cannot_be_read_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFiles(tmp_path / "run")
    run.root.mkdir()
    run.write_config("no_such_section: {}\n")
    assert command.template_inputs(str(run.root), "").key == TemplateInputs().key
    assert "note: the run's data.chat_template_kwargs, tools and documents are not used" in capsys.readouterr().err
