"""The benchmark of worker groups: its comparison and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.groups import CASES, Case, Result, distance, first_other_step, rewards_of, table
from quartet.config.loading import load_config
from quartet.run_directory.run_files import RunFiles


def saved(folder: Path, **tensors: list[float]) -> Path:
    folder.mkdir()
    save_file({name: torch.tensor(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def test_the_distance_of_policies_is_that_of_the_weights_that_both_have(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", w=[0.0, 1.0], v=[2.0]), saved(tmp_path / "b", w=[3.0, 1.0], v=[6.0], u=[9.0])
    assert distance(first, second) == pytest.approx(5.0)


def test_the_first_step_with_another_response_is_the_one_that_runs_part_at(tmp_path: Path) -> None:
    runs = [RunFiles(tmp_path / name) for name in "ab"]
    for run, last in zip(runs, ("x", "y"), strict=True):
        run.trajectories.mkdir(parents=True)
        for step, response in enumerate(("u", "v", last), 1):
            run.write_trajectories(step, [{"response": response}])
    assert first_other_step(*runs) == 3
    assert first_other_step(runs[0], runs[0]) == 0


def test_rewards_are_averaged_over_ten_steps(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.metrics.write_text("".join(json.dumps({"reward_mean": float(step)}) + "\n" for step in range(20)))
    assert rewards_of(files) == [4.5, 14.5]


def test_the_tables_name_each_case_and_a_repetition_that_differs() -> None:
    repeats, others = {1: True, 2: False, 4: True}, {"seed 0, 2 processes": 5}
    result = Result("RLOO, LoRA", {2: 1.5e-6, 4: 2e-6}, 1, others, repeats, {"1, seed 0": [0.5, 1.25]})
    text = table([result], "a machine")
    assert "| RLOO, LoRA | 1 | 1.5e-06 | 2.0e-06 | 1: yes, 2: no, 4: yes | seed 0, 2 processes: 5 |" in text
    assert "| RLOO, LoRA | 1, seed 0 | 0.50 1.25 |" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_configs_accept_the_settings_of_each_case(case: Case) -> None:
    groups = [f"services.{role}.processes=2" for role in case.roles]
    config = load_config(Path(__file__).parents[2] / case.config, [*case.settings, *groups])
    assert config.services.actor.processes == 2
