"""A config file, and files of runs as `quartet train` leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.launcher.sweep.grid import PlannedRun
from quartet.run_directory.run_files import RunFiles

WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Function that writes a config file with these sections added."""

    def write(**sections: Any) -> Path:
        tree: dict[str, dict[str, Any]] = {
            "run": {"name": "my", "steps": 20, "directory": str(tmp_path / "runs")},
            "data": {"prompts": "prompts.jsonl"},
            "actor": {"model": "policy"},
            "reward": {"model": "reward"},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture
def config(write_config: WriteConfig) -> Path:
    return write_config()


def write_run(run: PlannedRun, rewards: Sequence[float], evaluation: dict[str, float] | None = None) -> RunFiles:
    """Write the files of a run with these rewards, one for each step. It has finished if they are as many as its steps."""
    files = RunFiles(run.config.run_directory)
    files.write_config(run.config.to_yaml())
    lines = [{"step": step, "reward_mean": reward, "kl_mean": step / 10} for step, reward in enumerate(rewards, 1)]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluation is not None:
        files.write_evaluation(len(rewards), evaluation, [])
    if len(rewards) == run.config.run.steps:
        files.policy.mkdir()
        files.write_policy_step(len(rewards))
    return files
