"""The KL penalty is a term of the loss for estimators that divide by the standard deviation of a prompt's rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from quartet.config.live_settings import with_values
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.trajectory import FinishReason, Trajectory, TrajectoryId
from quartet.preflight.ineffective_settings import check_settings
from quartet.services.orchestrator.algorithm.experience import prepare_step
from quartet.services.orchestrator.algorithm.update_request import policy_loss_of
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory


def config(**algorithm: Any) -> Config:
    return parse_config(
        {
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
            "algorithm": algorithm,
        },
        "test",
    )


def custom(**needs: Any) -> dict[str, Any]:
    return {"estimator": "my_module:mine", "custom_estimator": {"uses_groups": True, **needs}}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, "none"),
        ({"estimator": "rloo"}, "none"),
        ({"estimator": "opo"}, "none"),
        ({"estimator": "reinforce_plus_plus_baseline"}, "none"),
        ({"estimator": "grpo"}, "k3"),
        ({"estimator": "grpo", "estimator_parameters": {"leave_one_out": True}}, "k3"),
        ({"estimator": "grpo", "estimator_parameters": {"normalize_std": False}}, "none"),
        ({"estimator": "grpo", "kl_loss": "none"}, "none"),
        ({"estimator": "rloo", "kl_loss": "k2"}, "k2"),
        (custom(), "none"),
        (custom(divides_by_group_std=True), "k3"),
        ({**custom(divides_by_group_std=True), "estimator_parameters": {"normalize_std": False}}, "none"),
    ],
)  # fmt: skip
def test_the_estimator_decides_the_default_which_the_resolved_config_shows(
    algorithm: dict[str, Any], expected: str
) -> None:
    whole = config(**algorithm)
    assert yaml.safe_load(whole.to_yaml())["algorithm"]["kl_loss"] == expected
    settings = policy_loss_of(with_values(whole, {"kl_coefficient": 0.3}).algorithm, whole.rollout)
    weight = 0.0 if expected == "none" else 0.3
    assert (settings.kl_loss, settings.kl_loss_coefficient) == (expected, weight)
    again = parse_config(yaml.safe_load(whole.to_yaml()), "config of the run")
    assert again == whole
    read = config(**yaml.safe_load(whole.to_yaml())["algorithm"])
    assert [*check_settings(again)] == [*check_settings(read)]


def advantages(groups: list[list[float]], **algorithm: Any) -> np.ndarray:
    """Return the advantages [prompts, samples] of responses of 8 tokens with these scores, whose KL is noise."""
    generator, scored = np.random.default_rng(0), []
    for prompt, scores in enumerate(groups):
        for sample, score in enumerate(scores):
            ids = np.arange(5, 13, dtype=np.int32)
            log_probs = generator.normal(-1, 0.1, 8).astype(np.float32)
            trajectory = Trajectory.of_response(
                TrajectoryId("run", 1, prompt, sample), 0, ids[:2], ids, log_probs, FinishReason.EOS
            )
            reference = np.full(8, -1, np.float32)
            scored.append(ScoredTrajectory(trajectory, score, reference, np.zeros(8, np.float32), {}))
    whole = config(**algorithm)
    experience = prepare_step("run", 1, 0, scored, whole.algorithm, None, 8).experience
    return experience.advantages.reshape(len(groups), -1, 8)[:, :, 0]


EQUAL_AND_MIXED = [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_of_equal_scores_has_no_advantages(leave_one_out: bool) -> None:
    settings = {"estimator": "grpo", "estimator_parameters": {"leave_one_out": leave_one_out}}
    equal, mixed = advantages(EQUAL_AND_MIXED, **settings)
    assert not equal.any()
    assert mixed.any()


def test_the_kl_in_the_rewards_of_a_group_gets_full_scale_and_a_warning() -> None:
    settings = {"estimator": "grpo", "kl_loss": "none"}
    equal = advantages(EQUAL_AND_MIXED, **settings)[0]
    assert np.sqrt((equal**2).mean()) > 0.8
    (note,) = check_settings(config(**settings))
    assert str(note).startswith(
        "warning: algorithm.kl_loss none: estimator grpo divides the rewards of a prompt by their"
    )
    for harmless in ({"estimator": "grpo"}, {**settings, "kl_coefficient": 0.0}, {"estimator": "rloo"}):
        assert not [*check_settings(config(**harmless))]
    assert [*check_settings(config(**custom(divides_by_group_std=True), kl_loss="none"))]


@pytest.mark.parametrize("estimator", ["rloo", "opo", "reinforce_plus_plus_baseline"])
def test_other_estimators_leave_the_kl_in_the_rewards_at_its_weight(estimator: str) -> None:
    equal, mixed = advantages(EQUAL_AND_MIXED, estimator=estimator)
    assert equal.any()
    assert np.abs(equal).max() < 0.1 * np.abs(mixed).max()
