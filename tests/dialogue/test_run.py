"""The configs of examples/dialogue: the tiny one trains what the programs make, and the planner accepts the others."""

from __future__ import annotations

import inspect
import json
import shutil
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from quartet.cli.plan import plan
from quartet.config.loading import load_config
from quartet.planner.placement import USABLE_FRACTION
from quartet.planner.workload import read_workload
from tests.dialogue.preference_files import write_dialogues
from tests.e2e.commands import QUARTET, Command, settings
from tests.training.runs import merged, parsed, run_to_completion
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


def prepare(programs: dict[str, ModuleType], folder: Path, rows: int, policy: list[str], reward: list[str]) -> None:
    """Make data, policy and reward model as the README says."""
    source = write_dialogues(folder / "rows.jsonl", rows)
    built = folder / "build/dialogue"
    for name, arguments in (
        ("prepare", [str(source), f"{built}/data", "--validation-fraction", "0.2"]),
        ("tiny_policy", [f"{built}/data", f"{built}/policy", *policy]),
        ("train_reward", [f"{built}/policy", f"{built}/data", f"{built}/reward", *reward]),
    ):
        assert programs[name].main(arguments) == 0, name


def test_the_tiny_config_trains_on_what_the_programs_make(
    programs: dict[str, ModuleType], tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ["--steps", "2", "--vocabulary", "300", "--hidden", "16", "--layers", "1"]
    prepare(programs, tmp_path, 200, policy, ["--batch-pairs", "64"])
    monkeypatch.chdir(tmp_path)
    changes = {
        "run": {"steps": 2, "directory": str(tmp_path / "runs")},
        "rollout": {"prompts_per_step": 4, "max_response_tokens": 8, "score_batch_size": 4},
        "evaluation": {"every_steps": 1, "max_prompts": 4},
        "buffer": {"url": redis_url},
    }
    run = run_to_completion(parsed(merged(yaml.safe_load((EXAMPLE / "tiny.yaml").read_text()), changes)))
    assert [step["step"] for step in run.metrics] == [1, 2]
    assert all(step["failed_trajectories"] == 0 for step in run.metrics)
    assert run.trajectories(1)[0]["prompt"].endswith("<bos>assistant\n")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tiny_run_learns_from_a_preference_file(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    prepare(programs, tmp_path, 4000, ["--steps", "300", "--vocabulary", "512"], ["--learning-rate", "1e-3"])
    options = settings("run.steps=30", "gateway.enabled=false")
    command = Command(
        QUARTET, "train", EXAMPLE / "tiny.yaml", *options, cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"}
    )
    try:
        result = command.wait(1200)
    finally:
        command.clean_up()
    assert result.code == 0, result
    rows = [json.loads(line) for line in (tmp_path / "runs/dialogue-tiny/metrics.jsonl").read_text().splitlines()]
    scores = [row["score_mean"] for row in rows]
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
