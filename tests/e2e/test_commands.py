"""The other commands: generate, config, doctor, demo."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from quartet.demo.toy_task import Recipe, ToyTask
from tests.e2e.commands import committed_steps, settings
from tests.e2e.conftest import Run, Service, Start

PROMPTS = ("a quick lunch with friends :", "a late dinner for two :")


def test_generate_completes_prompts_the_same_from_arguments_and_from_a_file(
    first_run: Run, start: Start, tmp_path: Path
) -> None:
    policy = first_run.directory / "policy"
    options = ("--max-tokens", "8", "--samples", "2", "--seed", "5")
    as_json = start("generate", policy, *PROMPTS, *options, "--json").ended()
    assert (as_json.code, as_json.err) == (0, "")
    records = [json.loads(line) for line in as_json.out.splitlines()]
    assert [record["prompt"] for record in records] == [prompt for prompt in PROMPTS for _ in range(2)]
    for record in records:
        assert 1 <= record["tokens"] <= 8
        assert record["finish_reason"] == ("length" if record["tokens"] == 8 else "eos")
    assert len({record["completion"] for record in records}) == 4, "every sample has its own random stream"

    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    as_text = start("generate", policy, "--file", file, *options).ended()
    assert (as_text.code, as_text.err) == (0, "")
    assert as_text.out == "".join(f"{record['prompt']}{record['completion']}\n" for record in records)


def test_generate_refuses_a_model_that_is_not_there(start: Start, tmp_path: Path) -> None:
    ended = start("generate", tmp_path / "absent", "a prompt").ended()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: model {tmp_path}/absent: no such directory")
    assert ended.err.count("\n") == 1


def test_config_check_says_what_it_found(start: Start, config: Path, toy_task: ToyTask) -> None:
    ended = start("config", "check", config).ended()
    assert (ended.code, ended.err) == (0, "")
    assert f"data.prompts {toy_task.prompts}: 288 prompts" in ended.out
    assert f"reward.model {toy_task.reward}: LlamaForSequenceClassification" in ended.out
    assert ended.out.endswith("valid\n")


def test_config_check_refuses_what_train_would_refuse(start: Start, config: Path, tmp_path: Path) -> None:
    ended = start("config", "check", config, *settings(f"data.prompts={tmp_path}/absent.jsonl")).ended()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: prompts {tmp_path}/absent.jsonl")


def test_config_show_prints_defaults_and_overrides_but_no_password(start: Start, config: Path) -> None:
    ended = start(
        "config",
        "show",
        config,
        *settings("run.steps=7", "actor.learning_rate=1e-5"),
        *settings("buffer.url=redis://me:secret@r/0"),  # pragma: allowlist secret - an example
    ).ended()
    assert ended.code == 0
    shown = yaml.safe_load(ended.out)
    assert (shown["run"]["steps"], shown["actor"]["learning_rate"]) == (7, 1e-5)
    assert shown["algorithm"]["clip_ratio"] == 0.2
    assert "secret" not in ended.out


def test_overlays_are_laid_over_a_config_that_is_shown_checked_or_diagnosed(
    start: Start, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.yaml").write_text("run: {steps: 5}\nsecurity: {token_file: /nowhere/token}\n")
    (tmp_path / "two.yaml").write_text("run: {steps: 6}\n")
    layers = ("--overlay", tmp_path / "one.yaml", "--overlay", tmp_path / "two.yaml")
    shown = start("config", "show", config, *layers).ended()
    assert yaml.safe_load(shown.out)["run"]["steps"] == 6
    checked = start("config", "check", config, *layers).ended()
    refused = "security.token_file /nowhere/token: cannot be read (No such file or directory)"
    assert (checked.code, checked.err.startswith(f"error: {refused}")) == (2, True)
    told = start("doctor", config, *layers).ended()
    assert told.code == 1
    assert re.search(r"failed +access +security\.token_file /nowhere/token", told.out)
    without_config = start("doctor", *layers).ended()
    assert (without_config.code, "need CONFIG" in without_config.err) == (2, True)


def test_doctor_describes_the_machine_and_what_a_config_needs(start: Start, config: Path) -> None:
    ended = start("doctor", config).ended()
    assert (ended.code, ended.err) == (0, "")
    seen = {words[1] for line in ended.out.splitlines() if len(words := line.split()) > 2 and words[0] == "ok"}
    assert {"quartet", "cores", "memory", "GPUs", "bf16", "input", "actor", "critic", "reward", "reference"} <= seen
    assert re.search(r"ok +embedded Redis +\S+", ended.out)


def test_doctor_names_failed_checks_and_fails(start: Start, config: Path, tmp_path: Path) -> None:
    wrong = settings(f"reward.model={tmp_path}/absent", "buffer.url=redis://127.0.0.1:1/0")
    ended = start("doctor", config, *wrong).ended()
    assert (ended.code, ended.err) == (1, "")
    assert re.search(r"failed +input +reward.model", ended.out)
    assert re.search(r"failed +buffer ", ended.out)


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
    ended = start("demo", "--directory", "shown", *options).ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert committed_steps(tmp_path / "shown" / "demo") == 4
    assert (tmp_path / "shown" / "demo" / "policy" / "model.safetensors").is_file()
    for shown in ("before", "after", "mean of 64", "standard deviations between responses"):
        assert shown in ended.out


def test_a_guard_pauses_a_run_and_commands_resume_and_stop_it(start: Start, config: Path, tmp_path: Path) -> None:
    # The tiny policy seldom ends a response within twelve tokens.
    guard = settings("run.steps=100000", "guards.window_steps=2", "guards.missing_eos={below: 1.0, action: pause}")
    command = start("train", config, *guard)
    command.wait_for(lambda: "quartet resume runs/tiny continues" in command.out)
    line = next(
        line for line in command.out.splitlines() if line.startswith("guard missing_eos (pause) after step 2: ")
    )
    assert all(part in line for part in ("eos_rate", "below 1", "algorithm.truncation.treatment"))
    paused_at = committed_steps(tmp_path / "runs" / "tiny")
    resumed = start("resume", "runs/tiny").ended()
    assert (resumed.code, resumed.out) == (0, "runs/tiny: continues\n")
    command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") > paused_at)
    assert start("pause", "runs/tiny").ended().code == 0
    assert start("stop", "runs/tiny").ended().code == 0
    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert (tmp_path / "runs" / "tiny" / "policy" / "model.safetensors").is_file()
    late = start("stop", "runs/tiny").ended()
    assert late.code == 2
    assert late.err == "error: run runs/tiny: not active; give the directory of an active run, such as runs/NAME\n"
