"""Config of a distillation, and of runs without a reward service."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.layout import memory_sharers, model_roles, num_threads
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.preflight.ineffective_settings import check_settings
from tests.training.runs import merged
from tests.unit.preflight.files import lines

DISTILLED: dict[str, Any] = {
    "data": {"prompts": "p.jsonl"},
    "algorithm": {"estimator": "reinforce", "kl_coefficient": 0.0, "distillation": {}},
    "actor": {"model": "student"},
    "reference": {"model": "teacher"},
    "reward": {"source": "none"},
}
TURNS = {"rollout": {"max_turns": 2}, "environment": {"class_name": "my:Game"}}


def config_of(**changes: Any) -> Config:
    return parse_config(merged(DISTILLED, changes), "test")


def test_a_distillation_needs_actor_and_reference_only() -> None:
    config = config_of()
    assert config.algorithm.distillation is not None
    assert (config.algorithm.distillation.coefficient, config.algorithm.distillation.discount) == (1.0, 0.0)
    assert (config.has_reward, config.has_scores, config.has_reference, config.has_critic) == (
        False,
        False,
        True,
        False,
    )
    assert model_roles(config) == (Role.ACTOR, Role.REFERENCE)
    assert config.models == {"actor.model": "student", "reference.model": "teacher"}
    assert set(memory_sharers(config, Role.ACTOR)) == {Role.ACTOR, Role.REFERENCE}
    assert num_threads(config, Role.ACTOR) == num_threads(config, Role.REFERENCE)
    assert not config.reward.sources
    assert not config.reward.needs_fields


def test_a_reward_and_a_critic_may_be_added() -> None:
    config = config_of(algorithm={"estimator": "gae"}, reward={"source": "model", "model": "r"})
    assert model_roles(config) == (Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE)
    assert config_of(actor={"lora": {}}).has_reference, "the teacher is no policy without its adapter"


def test_rewards_of_an_environment_need_no_reward_service() -> None:
    config = config_of(algorithm={"distillation": None}, **TURNS)
    assert (config.has_reward, config.has_scores) == (False, True)
    assert Role.REWARD not in model_roles(config)
    assert config_of(algorithm={"distillation": None, "estimator": "gae", "score": {"clip": 1.0}}, **TURNS).has_critic


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reference": {"model": None}},
            r"algorithm\.distillation: the reference is the teacher.*set reference\.model",
        ),
        ({"algorithm": {"kl_coefficient": 0.05}}, r"algorithm\.kl_coefficient 0\.05: .*set kl_coefficient 0"),
        ({"algorithm": {"ratio_level": "sequence"}}, r"algorithm\.ratio_level sequence: .*one ratio per token"),
        ({"algorithm": {"distillation": {"coefficient": 0}}}, r"algorithm\.distillation\.coefficient"),
        ({"algorithm": {"distillation": {"discount": 1.5}}}, r"algorithm\.distillation\.discount"),
        ({"algorithm": {"distillation": None}}, r"reward\.source none: there is nothing to learn from"),
        ({"algorithm": {"estimator": "gae"}}, r"algorithm\.estimator gae: its critic .*set estimator reinforce"),
        ({"algorithm": {"score": {"clip": 2.0}}}, r"algorithm\.score\.clip: changes scores"),
        ({"algorithm": {"score": {"scale": 2.0}}}, r"algorithm\.score\.scale: changes scores"),
        ({"algorithm": {"score": {"normalize": "running"}}}, r"algorithm\.score\.normalize: changes scores"),
        ({"algorithm": {"truncation": {"treatment": "penalty"}}}, r"algorithm\.truncation\.treatment penalty: changes"),
        ({"algorithm": {"length_penalty": {"per_token": 0.1}}}, r"algorithm\.length_penalty\.per_token: changes"),
        ({"algorithm": {"overlong_penalty": {"buffer_tokens": 4}}}, r"algorithm\.overlong_penalty\.buffer_tokens: ch"),
        ({"reward": {"model": "r"}}, r"reward\.model: not used with source none|model: not used with source none"),
        ({"reward": {"parts": [{"name": "a", "model": "m"}]}}, r"parts: not used with source none"),
        ({"services": {"reward": {"sharing": {}}}}, r"services\.reward\.sharing: with reward\.source none there is no"),
        (
            {"services": {"reward": {"processes": 2}}},
            r"services\.reward\.processes: with reward\.source none there is no",
        ),
        (
            {"services": {"reward": {"devices": [0, 1]}}},
            r"services\.reward\.devices: with reward\.source none there is no",
        ),
        ({"reward": {"signature": "trl"}}, r"signature: not used with source none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


def test_addresses_of_a_deployment_that_the_run_does_not_use_are_named() -> None:
    services = {"reward": {"address": "reward:50051", "devices": [0]}, "environment": {"address": "environment:50051"}}
    found = lines(check_settings(config_of(services=services, security={"allow_plaintext": True})))
    assert "warning: services.reward.address, services.reward.devices: not used: reward.source is none" in found
    assert "warning: services.environment.address: not used: rollout.max_turns is 0, so no environment is used" in found


def test_settings_without_effect_are_named() -> None:
    config = config_of(guards={"kl_runaway": {"above": 3}, "length_reward": {"above": 0.5}}, algorithm={"gamma": 1.0})
    found = lines(check_settings(config))
    assert "warning: guards.kl_runaway.above: not used: the KL to a teacher starts high and falls" in found
    assert any(
        line.startswith("warning: guards.length_reward.above: not used: reward.source is none") for line in found
    )
