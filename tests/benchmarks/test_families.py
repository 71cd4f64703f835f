"""The runs of hybrid, recurrent and indexed policies: their settings, the comparison of their states, and their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import families
from quartet.config.loading import load_config
from quartet.run_directory.run_files import RunFiles


def fake_run(folder: Path, kind: str, name: str, response: str = "good", weights: bytes = b"1") -> RunFiles:
    run = families.run_of(folder, kind, name)
    for path in (run.policy, run.trajectories, run.checkpoints / "step-000060" / "actor"):
        path.mkdir(parents=True)
    run.outcome.write_text('{"state": "finished"}')
    run.identity.write_text('{"engines": [{"batch_invariant": true}]}')
    steps = [{"step": step, "reward_mean": step / 10, "kl_mean": 2.0, "seconds": 0.5} for step in range(1, 61)]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run.policy / "model.safetensors").write_bytes(weights)
    trajectory = {"id": f"{run.root.name}/1/786/0", "response": response}
    if "generators" in name:
        trajectory |= {"generator": name, "weights_digest": "1f"}
    (run.trajectories / "step-000001.jsonl").write_text(json.dumps(trajectory) + "\n")
    return run


@pytest.mark.parametrize("name", families.RUNS)
def test_each_run_has_a_valid_config_and_a_critic_of_the_policys_type_if_any(name: str, tmp_path: Path) -> None:
    (_, _, config, *settings) = families.command_of(tmp_path, "lfm2", name)
    loaded = load_config(Path(config), [setting for setting in settings if setting != "--set"])
    assert loaded.run.steps == families.STEPS
    assert loaded.actor.model == str(tmp_path / "models" / "lfm2" / "policy")
    assert loaded.critic.model == (None if name == "GRPO" else loaded.actor.model)
    assert loaded.rollout.prompts_per_step * loaded.rollout.samples_per_prompt == 32


@pytest.mark.parametrize(
    ("change", "equal"),
    [({}, True), ({"response": "bad"}, False), ({"weights": b"2"}, False)],
    ids=["generator", "trajectory", "weights"],
)
def test_states_are_equal_if_weights_and_trajectories_are(tmp_path: Path, change: dict[str, Any], equal: bool) -> None:
    one = fake_run(tmp_path, "lfm2", "PPO")
    two = fake_run(tmp_path, "lfm2", "PPO, two generators", **change)
    assert (families.states(one) == families.states(two)) is equal


def test_the_tables_have_the_finished_runs_and_their_comparisons(tmp_path: Path) -> None:
    fake_run(tmp_path, "lfm2", "PPO")
    fake_run(tmp_path, "lfm2", "PPO, two kills")
    fake_run(tmp_path, "lfm2", "PPO, two generators", weights=b"2")
    text = families.table(tmp_path)
    assert "| lfm2 | PPO | 0.55 | 5.55 | 2.00 | 0.50 |" in text
    assert "| lfm2 | GRPO |" not in text
    assert text.splitlines()[-1].startswith("| lfm2 | yes | `")
    assert text.splitlines()[-1].endswith("` | yes | no |")


def test_a_run_that_ends_before_its_kill_is_an_error(tmp_path: Path) -> None:
    run, log = RunFiles(tmp_path / "run"), tmp_path / "log"
    with pytest.raises(families.ConfigError, match="ended with status 3"):
        families.train_with_kills(["sh", "-c", "exit 3"], run, log)
