"""Custom advantage estimators and policy losses in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.root import Config
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, orchestrator, run_to_completion, services, step_metrics, weights
from tests.training.test_resume import crash_run

MODULE = '''
import torch
from quartet.ppo.gae import Advantages, generalized_advantages
from quartet.ppo.losses import PolicyLoss
from quartet.ppo.policy_losses import clipped


def leave_one_out(inputs):
    """Independent RLOO: the reward minus the mean reward of the other samples of the prompt."""
    rewards = inputs.rewards.double()
    others = [
        rewards[(inputs.groups == group) & (torch.arange(len(rewards)) != index)].mean()
        for index, group in enumerate(inputs.groups)
    ]
    return (rewards - torch.stack(others)).float()


def with_critic(inputs):
    return generalized_advantages(inputs.rewards, inputs.values, inputs.lengths, inputs.gamma, inputs.gae_lambda)


def same_loss(inputs):
    return clipped(inputs)


def scaled(inputs):
    result = clipped(inputs)
    return PolicyLoss(inputs.parameters["scale"] * result.loss, result.clipped_tokens, result.approx_kl_sum)


def unclipped(inputs):
    log_ratio = inputs.log_probs - inputs.old_log_probs
    loss = (-inputs.advantages * log_ratio.exp() * inputs.weights).sum()
    return PolicyLoss(loss, torch.zeros(()), -log_ratio.detach().sum())


def per_token(inputs):
    return torch.zeros_like(inputs.values)


def number(inputs):
    return 1.0


value = 3
'''
GROUPS: dict[str, Any] = {"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2}}
LEAVE_ONE_OUT: dict[str, Any] = {
    "estimator": "my_algorithm:leave_one_out",
    "custom_estimator": {"uses_groups": True, "min_samples": 2},
}


@pytest.fixture(autouse=True)
def _user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an importable module with user functions."""
    (tmp_path / "my_algorithm.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_custom_estimator_and_loss_match_equivalent_built_in_ones(make: MakeConfig) -> None:
    built_in = run_to_completion(make(algorithm={"estimator": "gae"}))
    custom = run_to_completion(
        make(
            algorithm={
                "estimator": "my_algorithm:with_critic",
                "custom_estimator": {"needs_critic": True, "granularity": "token", "normalizes_advantages": True},
                "policy_loss": "my_algorithm:same_loss",
            }
        )
    )
    assert step_metrics(custom) == step_metrics(built_in)
    assert weights(custom) == weights(built_in)
    assert "value_loss" in custom.metrics[0]


def test_a_custom_estimator_can_compare_the_samples_of_a_prompt_and_needs_no_critic(make: MakeConfig) -> None:
    built_in = run_to_completion(make(algorithm={"estimator": "rloo"}, **GROUPS))
    custom = run_to_completion(make(algorithm=LEAVE_ONE_OUT, **GROUPS))
    assert weights(custom) == weights(built_in)
    assert "value_loss" not in custom.metrics[0]


def test_another_loss_gives_other_weights(make: MakeConfig) -> None:
    clipped = {"clip_ratio": 1e-6}
    assert weights(run_to_completion(make(algorithm={**clipped, "policy_loss": "my_algorithm:unclipped"}))) != weights(
        run_to_completion(make(algorithm=clipped))
    )


def test_a_custom_loss_reads_its_own_parameters(make: MakeConfig) -> None:
    built_in = run_to_completion(make())
    scaled = {"policy_loss": "my_algorithm:scaled"}
    same, half = (
        run_to_completion(make(algorithm={**scaled, "policy_loss_parameters": {"scale": scale}}))
        for scale in (1.0, 0.5)
    )
    assert weights(same) == weights(built_in)
    assert weights(half) != weights(built_in)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ("my_algorithm:leave_two_out", "has no leave_two_out; did you mean leave_one_out"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("my_algorithm:value", "expected a function"),
        ("my_algorithm:per_token", r"advantages: \[3\] torch.float32, expected \[2\]"),
        ("my_algorithm:same_loss", "a trial with 2 responses failed: AttributeError"),
    ],
)
def test_an_invalid_estimator_ends_the_run_at_its_start(estimator: str, message: str, make: MakeConfig) -> None:
    run = run_until_end(make(algorithm={"estimator": estimator, "custom_estimator": {}}))
    assert run.code == 2
    assert f"algorithm.estimator {estimator}" in run.progress.error
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(run.progress.error)


@pytest.mark.parametrize(
    "loss", ["my_algorithm:nothing", "my_algorithm:number", "my_algorithm:per_token", "my_algorithm:scaled"]
)
def test_an_invalid_loss_stops_the_start_of_the_actor(loss: str, make: MakeConfig) -> None:
    from quartet.errors import ConfigError

    with (
        pytest.raises(ConfigError, match=f"algorithm.policy_loss {loss}"),
        services(make(algorithm={"policy_loss": loss})),
    ):
        pass


def test_an_actor_refuses_another_loss_than_its_config_names(make: MakeConfig) -> None:
    config = make()
    with services(config) as addressed:
        other = addressed.model_copy(
            update={"algorithm": addressed.algorithm.model_copy(update={"policy_loss": "my_algorithm:same_loss"})}
        )
        with orchestrator(other) as running:
            run = running.finish()
    assert run.code != 0
    assert "this actor was started with clipped" in run.progress.error


def test_a_run_resumes_with_the_same_import_path_only(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = {**LEAVE_ONE_OUT, "policy_loss": "my_algorithm:same_loss"}
    uninterrupted = run_to_completion(
        make(run={"steps": 3}, algorithm=algorithm, checkpoint={"every_steps": 1}, **GROUPS)
    )
    config = make(run={"steps": 3}, algorithm=algorithm, checkpoint={"every_steps": 1}, **GROUPS)
    crash_run(config, "generate", 3, monkeypatch)
    for key, path in {"estimator": "my_algorithm:other", "policy_loss": "my_algorithm:unclipped"}.items():
        changed = config.algorithm.model_copy(update={key: path})
        refused = run_until_end(config.model_copy(update={"algorithm": changed}))
        assert refused.code == 2
        assert f"algorithm.{key}" in refused.progress.error
    assert weights(run_to_completion(config)) == weights(uninterrupted)


def run_until_end(config: Config) -> Run:
    with active_run(config) as running:
        return running.finish()
