"""Conditions on the KL penalty, the entropy and the parameters of estimators."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError

ABSOLUTE = {"kl_estimator": "absolute"}


def config(**sections: Any) -> Config:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"rollout": {"engine": "vllm", "generators": 1}}, "rollout.engine vllm"),
        ({"rollout": {"merge_adapter": True}, "actor": {"lora": {}}}, "rollout.merge_adapter"),
    ],
)
def test_an_estimate_that_rounding_biases_needs_the_log_probs_of_the_trainer(
    sections: dict[str, Any], cause: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"kl_estimator absolute: with {cause} .* set kl_estimator k1, or kl_log_probs"
    ):
        config(**sections, algorithm=ABSOLUTE)
    assert config(**sections, algorithm={**ABSOLUTE, "kl_log_probs": "trainer"}).algorithm.kl_log_probs == "trainer"
    assert config(**sections).algorithm.kl_estimator == "k1"


@pytest.mark.parametrize("source", ["rollout", "trainer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("role", ["actor", "reference"])
def test_an_estimate_that_rounding_biases_needs_float32(role: str, dtype: str, source: str) -> None:
    algorithm = {**ABSOLUTE, "kl_log_probs": source}
    with pytest.raises(ConfigError, match=rf"{role}.dtype {dtype} .* set kl_estimator k1, or {role}.dtype float32"):
        config(algorithm=algorithm, **{role: {"dtype": dtype}})
    config(algorithm=algorithm, **{role: {"dtype": "float32"}})
    assert config(**{role: {"dtype": dtype}}).algorithm.kl_estimator == "k1"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"entropy_coefficient": 2.0, "entropy_controller": {"kind": "adaptive"}},
            r"algorithm.entropy_coefficient 2: expected 0 to 1, the bounds of algorithm.entropy_controller",
        ),
        (
            {"entropy_controller": {"min_coefficient": 0.5, "max_coefficient": 0.1}},
            r"min_coefficient 0.5: expected at most max_coefficient 0.1",
        ),
        (
            {"estimator": "rloo", "estimator_parameters": {"normalize_std": False}},
            "estimator_parameters.normalize_std: estimator rloo has no such parameter; it has no parameters",
        ),
        (
            {"estimator": "grpo", "estimator_parameters": {"normalise_std": False}},
            "no such parameter; expected normalize_std, leave_one_out, std_epsilon",
        ),
        (
            {"estimator": "grpo", "estimator_parameters": {"normalize_std": 1.0}},
            "normalize_std: expected true or false",
        ),
        ({"estimator": "grpo", "estimator_parameters": {"std_epsilon": True}}, "std_epsilon: expected a number"),
        ({"estimator": "grpo", "estimator_parameters": {"std_epsilon": 0}}, "std_epsilon 0: expected more than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(algorithm=algorithm, rollout={"samples_per_prompt": 4})


def test_given_parameters_replace_the_defaults_of_a_built_in_estimator() -> None:
    algorithm = config(
        algorithm={"estimator": "grpo", "estimator_parameters": {"leave_one_out": True}},
        rollout={"samples_per_prompt": 4},
    ).algorithm
    assert algorithm.estimator_spec.parameters == {"normalize_std": True, "leave_one_out": True, "std_epsilon": 1e-4}


def test_a_custom_estimator_takes_any_parameters() -> None:
    parameters = {"anything": 3, "flag": True}
    algorithm = {"estimator": "a:b", "custom_estimator": {}, "estimator_parameters": parameters}
    assert config(algorithm=algorithm).algorithm.estimator_spec.parameters == parameters


ENVIRONMENT = {"rollout": {"max_turns": 2}, "environment": {"class_name": "my:Game"}}
TEACHER = {
    "algorithm": {"estimator": "reinforce", "kl_coefficient": 0.0, "distillation": {}},
    "reference": {"model": "t"},
    "reward": {"model": None, "source": "none"},
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "penalty"),
        ({"reward": {"model": None, "source": "function", "function": "my:score"}}, "penalty"),
        ({"algorithm": {"truncation": {"penalty": 3.0}}}, "penalty"),
        ({"algorithm": {"truncation": {"treatment": "keep"}}}, "keep"),
        (ENVIRONMENT, "keep"),
        ({**ENVIRONMENT, "algorithm": {"truncation": {"treatment": "penalty"}}}, "penalty"),
        (TEACHER, "keep"),
    ],
)
def test_a_truncated_response_has_a_penalty_unless_an_environment_sets_the_limits_or_nothing_is_scored(
    sections: dict[str, Any], expected: str
) -> None:
    shown = yaml.safe_load(config(**sections).to_yaml())
    assert shown["algorithm"]["truncation"]["treatment"] == expected
    assert parse_config(shown, "config of the run").to_yaml() == config(**sections).to_yaml()


def test_memory_is_planned_for_an_entropy_that_the_controller_may_add() -> None:
    assert not config().algorithm.trains_entropy
    assert config(algorithm={"entropy_coefficient": 0.01}).algorithm.trains_entropy
    assert config(algorithm={"entropy_controller": {"kind": "adaptive"}}).algorithm.trains_entropy
