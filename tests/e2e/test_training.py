"""Output files of a run, which only the seed and the config determine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from grpc_health.v1 import health_pb2
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.demo.toy_task import ToyTask
from tests.e2e.commands import committed_steps, settings
from tests.e2e.conftest import MAX_PROMPT, SAVED, STEPS, Run, Start, health, weights
from tests.waiting import LIMIT

METRICS = """
step reward_mean reward_std kl_mean kl_coefficient entropy policy_loss value_loss clip_fraction approx_kl
explained_variance advantage_std grad_norm_actor grad_norm_critic learning_rate_actor response_tokens_mean eos_rate
repetition prompt_tokens response_tokens seconds generate_seconds score_seconds update_seconds
"""
"""Metrics that the dashboards use."""


def test_a_run_succeeds_and_leaves_no_process(first_run: Run) -> None:
    assert first_run.result.code == 0, first_run.result
    assert first_run.result.err == ""
    assert first_run.result.leftovers == []


def test_every_step_is_printed_with_reward_kl_throughput_and_time_left(first_run: Run) -> None:
    lines = [line for line in first_run.result.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    for line in lines:
        assert all(word in line for word in (" reward ", " kl ", " tokens/s ", " left ")), line
    assert "policy: runs/tiny/policy" in first_run.result.out


def test_metrics_have_one_line_per_step_with_every_name(first_run: Run) -> None:
    assert [step["step"] for step in first_run.metrics] == list(range(1, STEPS + 1))
    for step in first_run.metrics:
        assert set(METRICS.split()) <= set(step)
        assert all(isinstance(value, int | float) for value in step.values())
        assert step["seconds"] >= step["update_seconds"] > 0


def test_trajectories_average_to_the_step_metrics(first_run: Run) -> None:
    for step in first_run.metrics:
        path = first_run.directory / "trajectories" / f"step-{step['step']:06d}.jsonl"
        trajectories = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({item["id"] for item in trajectories}) == 8
        for name, metric in (("score", "reward_mean"), ("kl", "kl_mean"), ("finished", "eos_rate")):
            assert sum(item[name] for item in trajectories) / 8 == pytest.approx(step[metric], abs=1e-6)
        assert sum(item["response_tokens"] for item in trajectories) == step["response_tokens"]


def test_the_resolved_config_is_saved(first_run: Run) -> None:
    saved = yaml.safe_load((first_run.directory / "config.yaml").read_text())
    assert (saved["run"]["name"], saved["run"]["seed"], saved["rollout"]["prompts_per_step"]) == ("tiny", 0, 8)
    assert saved["algorithm"]["gae_lambda"] == 0.95, "defaults are written out"


def test_the_newest_checkpoints_are_complete_and_match_their_checksums(first_run: Run) -> None:
    checkpoints = first_run.directory / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{step:06d}" for step in SAVED]
    for directory in checkpoints.iterdir():
        manifest = json.loads((directory / "manifest.json").read_text())
        assert manifest["step"] == int(directory.name.removeprefix("step-"))
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        assert set(files) == {*manifest["files"], "manifest.json"}
        assert {"actor/model.safetensors", "actor/optimizer.safetensors", "critic/model.safetensors"} <= set(files)
        for name, entry in manifest["files"].items():
            content = files[name].read_bytes()
            assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name


def test_the_last_checkpoint_contains_the_final_policy(first_run: Run) -> None:
    last = first_run.directory / "checkpoints" / f"step-{STEPS:06d}" / "actor" / "model.safetensors"
    assert last.read_bytes() == weights(first_run.directory)


def test_every_process_writes_a_log(first_run: Run) -> None:
    for name in ("actor", "critic", "reward", "reference", "orchestrator"):
        log = (first_run.directory / "logs" / f"{name}.log").read_text()
        assert f"role='{name}' event='ready'" in log
        assert "event='stopped'" in log, f"{name} was not drained"
    assert (first_run.directory / "logs" / "redis.log").stat().st_size


def test_the_policy_loads_with_transformers_generates_and_has_changed(first_run: Run, toy_task: ToyTask) -> None:
    policy = AutoModelForCausalLM.from_pretrained(first_run.directory / "policy")
    tokenizer = AutoTokenizer.from_pretrained(first_run.directory / "policy")
    prompt = tokenizer("a quick lunch with friends :", return_tensors="pt")
    generated = policy.generate(**prompt, max_new_tokens=5, do_sample=False, min_new_tokens=5)
    assert generated.shape[1] == prompt.input_ids.shape[1] + 5
    initial = AutoModelForCausalLM.from_pretrained(toy_task.policy)
    assert any(not torch.equal(*pair) for pair in zip(policy.parameters(), initial.parameters(), strict=True))


def test_prompts_over_the_limit_are_dropped_and_counted(first_run: Run, toy_task: ToyTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_task.policy)
    texts = [json.loads(line)["text"] for line in toy_task.prompts.read_text().splitlines()]
    too_long = {text for text in texts if len(tokenizer(text).input_ids) > MAX_PROMPT}
    assert 0 < len(too_long) < len(texts)
    warning = (
        f"warning: {len(too_long)} of {len(texts)} prompts are over data.max_prompt_tokens {MAX_PROMPT} and dropped"
    )
    assert warning in first_run.result.out
    for path in (first_run.directory / "trajectories").iterdir():
        assert not too_long & {json.loads(line)["prompt"] for line in path.read_text().splitlines()}


def test_up_keeps_the_services_until_interrupted_and_another_seed_gives_other_weights(
    first_run: Run, few_processes: list[str], start: Start, config: Path, tmp_path: Path
) -> None:
    command = start("up", config, *few_processes, *settings("run.seed=1"))
    command.wait_for(lambda: "the run has ended; the model services keep running" in command.out)
    addresses = dict(line.split() for line in command.out.splitlines() if line.startswith(("actor", "critic")))
    assert [health(address) for address in addresses.values()] == [health_pb2.HealthCheckResponse.SERVING] * 2
    os.kill(command.process.pid, signal.SIGINT)
    result = command.wait(LIMIT)
    assert (result.code, result.err, result.leftovers) == (130, "stopped\n", [])
    other = tmp_path / "runs" / "tiny"
    assert committed_steps(other) == STEPS
    assert weights(other) != weights(first_run.directory)
    assert Run(result, other).metrics[0]["prompt_tokens"] > 0
