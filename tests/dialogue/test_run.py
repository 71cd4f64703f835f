"""The configs of examples/dialogue: the tiny one trains what the programs make, and the planner accepts the others."""

from __future__ import annotations

import inspect
import re
import shutil
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from quartet.cli.plan import plan
from quartet.config.loading import load_config
from quartet.planner.placement import USABLE_FRACTION
from quartet.planner.workload import read_workload
from quartet.run_directory.step_lines import read_step_lines
from tests.e2e.commands import QUARTET, Command, settings
from tests.unit.planner.test_gpu_examples import cluster_of, placed_as_configured

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/dialogue"
PLANNED = {
    "qwen2.5-0.5b.yaml": {"Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b"},
    "qwen2.5-7b.yaml": {"Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b"},
}
"""Models of each config that the plan needs, and their folders of examples/plan/models."""
REWARD_MODEL_BYTES = 4 * 2**30
"""More than 0.6B parameters in bfloat16, the process, and the activations of one conversation need."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_pairs_become_a_policy_in_three_commands(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    data, base = tmp_path / "build/dialogue/data", tmp_path / "build/dialogue/base"
    assert programs["tiny"].main([str(data), str(base)]) == 0
    curves, outputs = {}, {}
    for command, name, config, options in (
        ("sft", "dialogue-sft", "tiny-sft.yaml", []),
        ("reward-model", "dialogue-reward-model", "tiny-reward-model.yaml", []),
        ("train", "dialogue-tiny", "tiny.yaml", settings("run.steps=25", "gateway.enabled=false")),
    ):
        process = Command(
            QUARTET, command, EXAMPLE / config, *options, cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"}
        )
        try:
            result = process.wait(600)
        finally:
            process.clean_up()
        assert result.code == 0, result
        assert result.leftovers == []
        outputs[command] = [line for line in result.out.splitlines() if "as the reward service" in line]
        curves[command] = read_step_lines(tmp_path / "runs" / name / "metrics.jsonl")
    losses = [line["validation_loss"] for line in curves["sft"] if "validation_loss" in line]
    assert losses[0] > losses[-1]
    assert losses[-1] < 1
    accuracy, longer = map(float, re.findall(r"(?:accuracy|longer answer:) ([0-9.]+)", outputs["reward-model"][-1]))
    assert accuracy > max(longer, 1 - longer) + 0.1
    scores = [line["score_mean"] for line in curves["train"]]
    assert statistics.fmean(scores[-5:]) > statistics.fmean(scores[:5]) + 0.5


@pytest.mark.parametrize("name", PLANNED)
def test_the_planner_accepts_the_configs_of_real_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for model, folder in PLANNED[name].items():
        cached = tmp_path / f"hub/models--{model.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("a" * 40)
        shutil.copy(ROOT / f"examples/plan/models/{folder}/config.json", snapshot)
    path = EXAMPLE / name
    cluster = cluster_of(path)
    plan(path, str(cluster).removeprefix("1x"), 1, [], [], None, None, False, None)
    assert "Proposed settings:" in capsys.readouterr().out
    config = load_config(path)
    placed = placed_as_configured(config, cluster, read_workload(config))
    shared = REWARD_MODEL_BYTES if config.reward.arguments["device"] == "cuda:0" else 0
    for device in range(cluster.total):
        assert sum(placed.memory(device).values()) + shared <= USABLE_FRACTION * cluster.device.memory


def test_the_reward_function_of_the_configs_has_their_arguments() -> None:
    from examples.dialogue.public_reward import score

    for name in PLANNED:
        reward = load_config(EXAMPLE / name).reward
        assert reward.function == "examples.dialogue.public_reward:score"
        inspect.signature(score).bind("prompt", "response", {}, **reward.arguments)
