"""Runs with each policy loss, through config, messages and services."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from tests.training.conftest import MakeConfig
from tests.training.runs import run_to_completion, step_metrics, weights
from tests.training.test_resume import crash_run

FAST = ("gspo", "clip_cov")
LOSSES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in BUILT_IN_POLICY_LOSSES
    if name != "clipped"
]
# Without epochs beyond the first, some losses give equal weights; without a wide selection, Clip-Cov selects nothing.
ALGORITHM: dict[str, Any] = {"estimator": "reinforce", "num_epochs": 2, "num_mini_batches": 2}
PARAMETERS = {
    "clip_cov": {"clip_cov_lb": -1e9, "clip_cov_ub": 1e9, "clip_cov_ratio": 0.3},
    "kl_cov": {"kl_cov_ratio": 0.3},
}


def options(name: str) -> dict[str, Any]:
    return {**ALGORITHM, "policy_loss": name, "policy_loss_parameters": PARAMETERS.get(name, {})}


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_trains_with_each_policy_loss(name: str, make: MakeConfig) -> None:
    run = run_to_completion(make(algorithm=options(name)))
    clipped = run_to_completion(make(algorithm=ALGORITHM))
    assert [step["optimizer_steps_actor"] for step in run.metrics] == [4, 4]
    assert all(0 <= step["clip_fraction"] <= 1 for step in run.metrics)
    assert weights(run) != weights(clipped)
    assert not run.progress.alerts


def test_a_killed_run_with_a_random_selection_ends_with_the_same_bits(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_to_completion(make(run={"steps": 3}, algorithm=options("clip_cov"), checkpoint={"every_steps": 1}))
    config = make(run={"steps": 3}, algorithm=options("clip_cov"), checkpoint={"every_steps": 1})
    crash_run(config, "generate", 3, monkeypatch)
    resumed = run_to_completion(config)
    assert weights(resumed) == weights(whole)
    assert step_metrics(resumed)[-1] == step_metrics(whole)[-1]
