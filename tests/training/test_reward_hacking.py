"""The shipped example: a flawed reward triggers the guard, and a length penalty keeps the run healthy."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from quartet.config.root import Config
from quartet.contract.control import RunState
from quartet.demo.toy_task import ToyTask, make_toy_task
from tests.training.runs import active_run, merged, parsed, run_to_completion, wait_for

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reward_hacking"


@pytest.fixture(scope="module")
def demo_toy_task(tmp_path_factory: pytest.TempPathFactory) -> ToyTask:
    """The toy task of the demo, which the example uses."""
    return make_toy_task(tmp_path_factory.mktemp("demo") / "toy-task")


def example(name: str, steps: int, toy_task: ToyTask, redis_url: str, folder: Path) -> Config:
    shipped = yaml.safe_load((EXAMPLE / name).read_text())
    parts = [
        {**part, **({"model": str(toy_task.reward)} if "model" in part else {})} for part in shipped["reward"]["parts"]
    ]
    paths: dict[str, Any] = {
        "run": {"steps": steps, "directory": str(folder)},
        "data": {"prompts": str(toy_task.prompts)},
        "actor": {"model": str(toy_task.policy)},
        "critic": {"model": str(toy_task.reward)},
        "reward": {"parts": parts},
        "buffer": {"url": redis_url},
    }
    return parsed(merged(shipped, paths))


@pytest.mark.slow
def test_a_reward_for_length_pauses_the_run_with_its_explanation(
    demo_toy_task: ToyTask, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with active_run(example("exploit.yaml", 60, demo_toy_task, redis_url, tmp_path)) as running:
        wait_for(running, lambda: running.board.current().state is RunState.PAUSED, seconds=200)
        running.control.stop()
        run = running.finish()
    (alert,) = [alert for alert in run.progress.alerts if alert.guard == "reward_hacking"]
    assert alert.action == "pause"
    assert "response length from" in alert.evidence
    assert "algorithm.length_penalty" in alert.remedy
    assert len(run.metrics) < 40
    assert run.metrics[-1]["response_tokens_mean"] > 1.5 * run.metrics[0]["response_tokens_mean"]


@pytest.mark.slow
def test_a_length_penalty_keeps_the_same_run_healthy(
    demo_toy_task: ToyTask, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = run_to_completion(example("healthy.yaml", 40, demo_toy_task, redis_url, tmp_path))
    assert run.progress.alerts == []
    first, last = run.metrics[:3], run.metrics[-5:]
    assert fmean(step["response_tokens_mean"] for step in last) < 40
    assert fmean(step["reward_tone_mean"] for step in last) > fmean(step["reward_tone_mean"] for step in first) + 1


def test_the_two_configs_differ_only_in_the_length_penalty() -> None:
    exploit, healthy = (yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text()) for name in ("exploit", "healthy"))
    assert healthy["algorithm"].pop("length_penalty")
    assert exploit["run"].pop("name") != healthy["run"].pop("name")
    assert exploit == healthy
