"""Settings of evaluation sets: what fits together, and which function finds the answers."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.evaluation import AnswerFunction
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError

MATH = {
    "source": "function",
    "function": "quartet.verifiers.math:final_answer",
    "arguments": {"decimals": 3, "answer_field": "a"},
}
NONE: dict[str, Any] = {
    "algorithm": {"estimator": "reinforce", "distillation": {}, "kl_coefficient": 0.0},
    "reference": {"model": "t"},
    "reward": {"source": "none"},
}


def config(*sets: dict[str, Any], **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "critic": {"model": "a"},
        "reward": MATH,
        "evaluation": {"every_steps": 5, "sets": [{"name": "gsm8k", "path": "g", **each} for each in sets]},
    }
    return parse_config(tree | sections, "test")


def test_sets_need_no_validation_prompts() -> None:
    each = config({"samples_per_prompt": 4, "pass_at": [1, 4], "maj_at": [3]}).evaluation.sets[0]
    assert each.metrics == ["eval_gsm8k_pass_at_1", "eval_gsm8k_pass_at_4", "eval_gsm8k_maj_at_3"]
    assert each.success_score == 1.0


def test_a_verifier_finds_the_answers_with_its_own_arguments() -> None:
    each = {"samples_per_prompt": 3, "maj_at": [3]}
    found = config(each)
    expected = AnswerFunction("reward.function", "quartet.verifiers.math:given_answer", {"decimals": 3})
    assert found.evaluation.sets[0].answer_function(found.reward) == expected
    own = config(each | {"answer": "mine:answer"}, reward={"model": "r"})
    expected = AnswerFunction("evaluation.sets.gsm8k.answer", "mine:answer", {})
    assert own.evaluation.sets[0].answer_function(own.reward) == expected


@pytest.mark.parametrize(
    ("sets", "sections", "message"),
    [
        ([{"pass_at": [2]}], {}, "pass_at: 2 is above samples_per_prompt 1"),
        ([{"samples_per_prompt": 4, "maj_at": [5]}], {}, "maj_at: 5 is above samples_per_prompt 4"),
        ([{"pass_at": [1, 1]}], {}, r"pass_at: expected each value once, got \[1, 1\]"),
        ([{"answer": "mine:answer"}], {}, "answer: only used with maj_at"),
        ([{}, {}], {}, "two sets have the name gsm8k"),
        ([{"name": "a/b"}], {}, "evaluation.sets"),
        (
            [{"maj_at": [1]}],
            {"reward": {"model": "r"}},
            r"gsm8k.maj_at: the reward \(source model\) has no answers to vote on; set",
        ),
        (
            [{"maj_at": [1]}],
            {"reward": {"source": "function", "function": "mine:score"}},
            r"gsm8k.maj_at: the reward \(mine:score\) has no answers to vote on",
        ),
        ([{"pass_at": [1]}], NONE, "gsm8k.pass_at: reward.source is none, so no response is a success"),
        ([], {}, "evaluation.every_steps 5: data.validation is null; set data.validation or evaluation.sets"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    sets: list[dict[str, Any]], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*sets, **sections)


BESIDE: dict[str, Any] = {"every_steps": 5, "sets": [{"name": "gsm8k", "path": "g"}], "generators": 1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"evaluation": {**BESIDE, "every_steps": 0}},
        "evaluation.generators 1: evaluation.every_steps is 0, so there are no evaluations; set it above 0",
    ),
    (
        {"rollout": {"generators": 1}},
        "evaluation.generators 1: at least one other generator must be left for training, and rollout.generators is 1; set "
        "rollout.generators to 2 or more",
    ),
    (
        {"actor": {"model": "a", "lora": {}}},
        "evaluation.generators 1: with actor.lora the actor is the reference, .*; set reference.model to the model of the actor",
    ),
    (
        {"rollout": {"generators": 2, "engine": "vllm", "vllm": {"release_memory": True}}},
        "evaluation.generators 1: .* so rollout.vllm.release_memory cannot free them in between; set release_memory false",
    ),
    (
        {"rollout": {"generators": 2, "engine": "vllm", "top_p": 0.9}},
        "evaluation.generators 1: .* engine vllm reports none with rollout.top_p 0.9; set top_p 1, or evaluation.generators 0",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_generators_that_cannot_evaluate_beside_training_are_refused(changes: dict[str, Any], message: str) -> None:
    usable: dict[str, Any] = {"evaluation": BESIDE, "rollout": {"generators": 2}}
    assert config(**usable).evaluation.generators == 1
    with pytest.raises(ConfigError, match=message):
        config(**usable | changes)


def test_the_number_of_generators_behind_addresses_is_not_known() -> None:
    sections = {"services": {"generators": ["pool:1"]}, "buffer": {"url": "redis://r:1"}, "evaluation": BESIDE}
    sections["security"] = {"allow_plaintext": True}
    assert config(**sections).evaluation.generators == 1


def test_generators_of_live_traffic_are_not_kept_for_evaluations() -> None:
    traffic: dict[str, Any] = {
        "environment": {"kind": "traffic", "traffic": {"operator_keys_file": "operators"}},
        "rollout": {"generators": 2, "max_turns": 4, "max_off_policy_steps": 1, "in_flight_updates": True},
        "reward": {"source": "none"},
        "evaluation": {**BESIDE, "sets": [{"name": "gsm8k", "path": "g"}]},
    }
    with pytest.raises(
        ConfigError, match=r"evaluation\.generators 1: each generator of environment\.kind traffic answers users"
    ):
        config(**traffic)
