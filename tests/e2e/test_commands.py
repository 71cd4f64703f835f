"""The commands generate, config, doctor, demo, pause, resume and stop."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from quartet import __version__
from quartet.demo.toy_task import Recipe, ToyTask
from tests.e2e.commands import committed_steps, settings
from tests.e2e.conftest import Call, Run, Service, Start

PROMPTS = ("a quick lunch with friends :", "a late dinner for two :")


@pytest.mark.slow
def test_generate_gives_the_same_completions_for_prompts_from_arguments_and_from_a_file(
    first_run: Run, call: Call, tmp_path: Path
) -> None:
    policy = first_run.directory / "policy"
    options = ("--max-tokens", "8", "--samples", "2", "--seed", "5")
    as_json = call("generate", policy, *PROMPTS, *options, "--json")
    assert (as_json.code, as_json.err) == (0, "")
    records = [json.loads(line) for line in as_json.out.splitlines()]
    assert [record["prompt"] for record in records] == [prompt for prompt in PROMPTS for _ in range(2)]
    for record in records:
        assert 1 <= record["tokens"] <= 8
        assert record["finish_reason"] == ("length" if record["tokens"] == 8 else "eos")
    assert len({record["completion"] for record in records}) == 4, "every sample has its own random stream"

    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    # The directory of the run stands for its policy.
    as_text = call("generate", first_run.directory, "--file", file, *options)
    assert (as_text.code, as_text.err) == (0, "")
    assert as_text.out == "".join(f"{record['prompt']}{record['completion']}\n" for record in records)


@pytest.fixture
def chat_model(first_run: Run, tmp_path: Path) -> Path:
    """The policy of a run, with a chat template. It has positions for 128 tokens."""
    model = Path(shutil.copytree(first_run.directory / "policy", tmp_path / "chat_model"))
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}assistant :"
    )
    return model


def test_a_chat_answers_each_line_of_a_pipe_and_remembers_earlier_lines(
    chat_model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(text: str, *options: str) -> tuple[list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        result = call("generate", chat_model, "--chat", "--max-tokens", "8", *options)
        assert result.code == 0
        return result.out.splitlines(), result.err

    as_json, _ = answers("hello\n\nand now\n", "--json", "--system", "be brief")
    assert [json.loads(line)["prompt"] for line in as_json] == ["hello", "and now"]
    assert all(json.loads(line)["completion"] for line in as_json)
    assert answers("hello\n", "--json", "--system", "be brief")[0] == as_json[:1]

    # The conversation, not a single message, gets too long for the model.
    long = "a quick lunch with friends and a late dinner for two\n"
    _, err = answers(long * 8)
    assert "the model has positions for 128" in err
    assert "/reset begins a new conversation" in err
    assert answers(f"{long}/reset\n" * 8)[1] == ""


def test_text_that_is_not_utf_8_is_refused(
    call: Call, first_run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("generate", first_run.directory, os.fsdecode(b"caf\xe9"))
    assert result.code == 2
    assert "generate: prompt 1: is not valid Unicode" in result.err
    for errors, reason in (("strict", "standard input is not UTF-8"), ("surrogateescape", "is not valid Unicode")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
        result = call("generate", chat_model, "--chat")
        assert result.code == 2
        assert f"generate --chat: {reason}" in result.err


def test_a_chat_needs_a_chat_template_and_no_prompts(call: Call, first_run: Run) -> None:
    result = call("generate", first_run.directory, "--chat")
    assert (result.code, result.out) == (2, "")
    assert "has no chat template; complete text with quartet generate" in result.err
    assert "remove PROMPT" in call("generate", first_run.directory, "hello", "--chat").err
    assert "only used with --chat" in call("generate", first_run.directory, "hello", "--system", "be brief").err


@pytest.mark.parametrize("options", [("hello",), ("--chat",)], ids=["text", "chat"])
def test_a_completion_ends_with_a_stop_text(
    options: tuple[str, ...], chat_model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completion(*stop: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        result = call("generate", chat_model, *options, "--json", "--max-tokens", "12", *stop)
        assert result.code == 0, result.err
        text: str = json.loads(result.out)["completion"]
        return text

    whole = completion()
    letter = next(character for character in whole if character.isascii() and character.isalpha())
    stopped = completion("--stop", "not in the text", "--stop", letter)
    assert letter in stopped
    assert whole.startswith(stopped)
    assert len(stopped) < len(whole)


def test_penalties_change_a_completion(chat_model: Path, call: Call) -> None:
    def completion(*options: str) -> str:
        result = call("generate", chat_model, "hello", "--json", "--temperature", "0", "--max-tokens", "12", *options)
        assert result.code == 0, result.err
        text: str = json.loads(result.out)["completion"]
        return text

    plain = completion()
    for option, value in (("repetition", "0.01"), ("presence", "-2"), ("frequency", "-2")):
        assert completion(f"--{option}-penalty", value) != plain, option
    assert "--repetition-penalty 0: expected more" in call("generate", "missing", "a", "--repetition-penalty", "0").err


def test_stop_texts_have_the_limits_of_the_config(call: Call) -> None:
    result = call("generate", "missing", "hello", "--stop", "a" * 65)
    assert result.code == 2
    assert "--stop" in result.err
    assert "expected 1 to 64 characters" in result.err


def test_the_version_is_printed(call: Call) -> None:
    result = call("--version")
    assert (result.code, result.out, result.err) == (0, f"quartet {__version__}\n", "")


def test_generate_refuses_a_run_that_has_not_ended(call: Call, first_run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((first_run.directory / "config.yaml").read_bytes())
    result = call("generate", tmp_path, "a prompt")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(
        f"error: run {tmp_path}: has no saved policy, because it has not ended; wait for its first checkpoint"
    )


def test_generate_refuses_a_missing_model(call: Call, tmp_path: Path) -> None:
    result = call("generate", tmp_path / "absent", "a prompt")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: model {tmp_path}/absent: no such directory")
    assert result.err.count("\n") == 1


def test_config_check_reports_the_prompts_and_models(call: Call, config: Path, toy_task: ToyTask) -> None:
    result = call("config", "check", config)
    assert (result.code, result.err) == (0, "")
    assert f"data.prompts {toy_task.prompts}: 186 prompts" in result.out
    assert "warning: data.prompts: 102 of 288 prompts" in result.out
    assert f"reward.model {toy_task.reward}: LlamaForSequenceClassification" in result.out
    assert result.out.endswith("valid\n")


def test_config_check_refuses_a_missing_prompts_file(call: Call, config: Path, tmp_path: Path) -> None:
    result = call("config", "check", config, *settings(f"data.prompts={tmp_path}/absent.jsonl"))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: data.prompts {tmp_path}/absent.jsonl")


def test_config_show_prints_defaults_and_overrides_but_no_password(call: Call, config: Path) -> None:
    result = call(
        "config",
        "show",
        config,
        *settings("run.steps=7", "actor.learning_rate=1e-5"),
        *settings("buffer.url=redis://me:secret@r/0"),  # pragma: allowlist secret - an example
    )
    assert result.code == 0
    shown = yaml.safe_load(result.out)
    assert (shown["run"]["steps"], shown["actor"]["learning_rate"]) == (7, 1e-5)
    assert shown["algorithm"]["value_clip"] == 0.2
    assert "secret" not in result.out


@pytest.mark.parametrize("command", ["train", "up"])
def test_the_environment_gives_the_address_of_redis_with_its_password(
    command: str, call: Call, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARTET_BUFFER_URL", "redis://me:secret@127.0.0.1:1/0")  # pragma: allowlist secret - an example
    result = call(command, config, *settings("buffer.url=redis://me:***@127.0.0.1:1/0"))
    assert (result.code, "redis://me:***@127.0.0.1:1/0: unreachable" in result.err) == (2, True), result.err


def test_overlays_apply_to_config_show_config_check_and_doctor(call: Call, config: Path, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("run: {steps: 5}\nsecurity: {token_file: /nowhere/token}\n")
    (tmp_path / "two.yaml").write_text("run: {steps: 6}\n")
    layers = ("--overlay", tmp_path / "one.yaml", "--overlay", tmp_path / "two.yaml")
    shown = call("config", "show", config, *layers)
    assert yaml.safe_load(shown.out)["run"]["steps"] == 6
    checked = call("config", "check", config, *layers)
    refused = "security.token_file /nowhere/token: cannot be read (No such file or directory)"
    assert (checked.code, checked.err.startswith(f"error: {refused}")) == (2, True)
    diagnosed = call("doctor", config, *layers)
    assert diagnosed.code == 1
    assert re.search(r"failed +input +security\.token_file /nowhere/token", diagnosed.out)
    without_config = call("doctor", *layers)
    assert (without_config.code, "need CONFIG" in without_config.err) == (2, True)


def test_doctor_describes_the_machine_and_what_a_config_needs(start: Start, config: Path) -> None:
    result = start("doctor", config).wait()
    assert (result.code, result.err) == (0, "")
    checks = {words[1] for line in result.out.splitlines() if len(words := line.split()) > 2 and words[0] == "ok"}
    assert {"quartet", "cores", "memory", "GPUs", "bf16", "input", "actor", "critic", "reward", "reference"} <= checks
    assert re.search(r"ok +embedded Redis +\S+", result.out)


def test_doctor_reports_failed_checks_and_exits_with_1(call: Call, config: Path, tmp_path: Path) -> None:
    invalid = settings(f"reward.model={tmp_path}/absent", "buffer.url=redis://127.0.0.1:1/0")
    result = call("doctor", config, *invalid)
    assert (result.code, result.err) == (1, "")
    assert re.search(r"failed +input +reward.model", result.out)
    assert re.search(r"failed +buffer ", result.out)


def test_demo_trains_and_shows_completions_before_and_after(
    start: Start, toy_task: ToyTask, frozen: Service, tmp_path: Path
) -> None:
    ready = tmp_path / "shown" / "toy-task"
    shutil.copytree(toy_task.policy.parent, ready)
    # The demo would build its toy task in a minute. Label the tests' smaller one as the demo's instead.
    label = json.loads((ready / "toy_task.json").read_text())
    label["recipe"] |= json.loads(json.dumps(asdict(Recipe())))
    (ready / "toy_task.json").write_text(json.dumps(label))
    small = settings(
        "run.steps=4", "rollout.prompts_per_step=8", "rollout.max_response_tokens=12", "algorithm.num_epochs=1"
    )
    options = (*small, *frozen.serving("reward", "reference"))
    result = start("demo", "--directory", "shown", *options).wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert committed_steps(tmp_path / "shown" / "demo") == 4
    assert (tmp_path / "shown" / "demo" / "policy" / "model.safetensors").is_file()
    for shown in ("before", "after", "mean of 64", "standard deviations between responses"):
        assert shown in result.out


@pytest.mark.slow  # tests/training/test_guard_actions.py pauses runs, tests/e2e/test_gateway.py sends commands.
def test_a_guard_pauses_a_run_and_commands_resume_and_stop_it(
    start: Start, call: Call, config: Path, tmp_path: Path
) -> None:
    # The miniature policy seldom ends a response within twelve tokens, so the guard applies.
    guard = settings(
        "run.steps=100000", "guards.window_steps=2", "guards.missing_eos={below: 1.0, min_fall: 1, action: pause}"
    )
    command = start("train", config, *guard)
    command.wait_for(lambda: "quartet resume runs/tiny continues" in command.out)
    line = next(
        line for line in command.out.splitlines() if line.startswith("guard missing_eos (pause) after step 2: ")
    )
    assert all(part in line for part in ("eos_rate", "below 1", "algorithm.truncation.treatment"))
    paused_at = committed_steps(tmp_path / "runs" / "tiny")
    resumed = call("resume", "runs/tiny")
    assert (resumed.code, resumed.out) == (0, "runs/tiny: continues\n")
    command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") > paused_at)
    assert call("pause", "runs/tiny").code == 0
    assert start("stop", "runs/tiny").wait().code == 0
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert (tmp_path / "runs" / "tiny" / "policy" / "model.safetensors").is_file()
    late = call("stop", "runs/tiny")
    assert late.code == 2
    assert late.err.startswith("error: run runs/tiny: is not active: ")
