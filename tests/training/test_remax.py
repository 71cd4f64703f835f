"""ReMax: a greedy response per prompt as the baseline, in whole runs that end with the same bits after failures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.root import Config
from quartet.services.orchestrator.rollout.collector import CollectedStep
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, assert_same, run_to_completion, services
from tests.training.test_resume import crash_run

PROMPTS, SAMPLES = 3, 2
FUNCTIONS = """
from zlib import crc32

def by_text(prompt, response, fields):
    return crc32((prompt + "|" + response).encode()) / 2**32
"""
ESTIMATOR = """
def minus_greedy(inputs):
    assert len(inputs.baselines) == len(inputs.rewards)
    return inputs.rewards - inputs.baselines
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "my_estimator.py").write_text(ESTIMATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def config(make: MakeConfig, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "run": {"steps": 5},
        "reward": {"source": "function", "function": "mine:by_text", "model": None},
        "critic": {"model": None},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "recovery": {"backoff_seconds": 0.01},
        **changes,
        "algorithm": {"estimator": "remax", **changes.get("algorithm", {})},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, **changes.get("rollout", {})},
    }
    return make(**sections)


@pytest.fixture(scope="module")
def cache() -> dict[str, Run]:
    """A cache of the uninterrupted run."""
    return {}


@pytest.fixture
def uninterrupted(cache: dict[str, Run], make: MakeConfig) -> Run:
    if not cache:
        cache["run"] = run_to_completion(config(make))
    return cache["run"]


def test_each_prompt_has_a_greedy_response_that_is_scored_and_not_trained_on(
    make: MakeConfig, collected: list[CollectedStep]
) -> None:
    run = run_to_completion(config(make, run={"steps": 2}, rollout={"temperature": 0.7}))
    for number, (step, metrics) in enumerate(zip(collected, run.metrics, strict=True), 1):
        ids = [item["id"] for item in run.trajectories(number)]
        assert Counter(id.split("/")[2] for id in ids) == Counter(
            {str(item.trajectory.id.prompt): SAMPLES for item in step.baselines}
        )
        assert [item.trajectory.id.sample for item in step.baselines] == [SAMPLES] * PROMPTS
        assert not {str(item.trajectory.id) for item in step.baselines} & set(ids)
        assert metrics["baseline_reward_mean"] == pytest.approx(np.mean([item.score for item in step.baselines]))
        # The likeliest tokens, although the log-probs of the sampled ones are at temperature 0.7.
        sampled = np.concatenate([item.trajectory.log_probs for item in step.scored])
        greedy = np.concatenate([item.trajectory.log_probs for item in step.baselines])
        assert greedy.mean() > sampled.mean()


@pytest.mark.slow
def test_crashes_and_generators_change_no_bit(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two generators finish the run that the engine of the actor began."""
    crashed = config(make)
    with services(crashed) as addressed:
        for crash_point, step in [("committed", 2), ("generate", 4), ("sealed", 4), ("updated", 4)]:
            crash_run(addressed, crash_point, step, monkeypatch)
    assert_same(run_with_generators(crashed, 2), uninterrupted)


def test_a_custom_estimator_can_ask_for_the_baselines(make: MakeConfig) -> None:
    run = run_to_completion(
        config(
            make,
            run={"steps": 1},
            algorithm={
                "estimator": "my_estimator:minus_greedy",
                "custom_estimator": {"needs_greedy_baseline": True},
            },
        )
    )
    assert run.metrics[0]["baseline_reward_mean"] > 0
