"""Settings without effect are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import load_config, parse_config
from quartet.config.root import Config
from quartet.preflight.ineffective_settings import check_settings
from tests.unit.preflight.files import check_inputs, lines


def minimal(models: Path, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"prompts": str(models / "prompts.jsonl")},
        "actor": {"model": str(models / "policy")},
        "reward": {"model": str(models / "reward")},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2},
        **sections,
    }


NO_CRITIC = "algorithm.estimator rloo has no critic"


RLOO = {"estimator": "rloo"}


@pytest.mark.parametrize(
    ("sections", "keys", "reason"),
    [
        ({"critic": {"learning_rate": 1e-4, "optimizer": {"eps": 1e-6}}}, "critic.learning_rate, critic.optimizer.eps",
         NO_CRITIC),
        ({"critic": {"model": "a/b", "schedule": "constant", "final_learning_rate": 0.0}},
         "critic.schedule, critic.final_learning_rate, critic.model", NO_CRITIC),
        ({"algorithm": {**RLOO, "value_clip": 0.3, "gae_lambda": 0.95}}, "algorithm.gae_lambda, algorithm.value_clip",
         NO_CRITIC),
        ({"algorithm": {**RLOO, "value_pretraining_steps": 0}}, "algorithm.value_pretraining_steps", NO_CRITIC),
        ({"services": {"critic": {"num_threads": 2}}}, "services.critic.num_threads", NO_CRITIC),
        ({"guards": {"critic_lost": {"action": "stop"}}}, "guards.critic_lost.action", NO_CRITIC),
        ({"actor": {"model": "a/b", "lora": {}}, "reference": {"dtype": "float32", "micro_batch_tokens": 9}},
         "reference.dtype, reference.micro_batch_tokens", "the actor serves the reference, with its adapter disabled"),
        ({"actor": {"model": "a/b", "lora": {}}, "services": {"reference": {"devices": [1]}}},
         "services.reference.devices", "the actor serves the reference, with its adapter disabled"),
        ({"algorithm": {**RLOO, "kl_controller": {"target": 3.0, "horizon": 10_000.0}}},
         "algorithm.kl_controller.target, algorithm.kl_controller.horizon", "algorithm.kl_controller.kind is fixed"),
        ({"algorithm": {**RLOO, "truncation": {"treatment": "scale", "penalty": 2.0, "scale": 0.1}}},
         "algorithm.truncation.penalty", "algorithm.truncation.treatment is scale"),
        ({"algorithm": {**RLOO, "truncation": {"scale": 0.1}}}, "algorithm.truncation.scale",
         "algorithm.truncation.treatment is penalty"),
        ({"actor": {"model": "a/b", "final_learning_rate": 1e-6}}, "actor.final_learning_rate",
         "actor.schedule is constant"),
        ({"actor": {"model": "a/b", "compile": True, "gradient_checkpointing": True}}, "actor.compile",
         "actor.gradient_checkpointing is true, and torch does not compile recomputed layers"),
        ({"rollout": {"generators": 1, "samples_per_prompt": 2, "share_weights": False, "share_directory": "/s"}},
         "rollout.share_directory", "rollout.share_weights is false"),
        ({"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "share_weights": False, "share_directory": "/shared"}},
         "rollout.share_weights, rollout.share_directory", "the actor generates, and its engine has the weights"),
        ({"rollout": {"generators": 1, "samples_per_prompt": 2, "share_gpu_memory": True}},
         "rollout.share_gpu_memory", "services.actor.devices does not name one GPU"),
        ({"rollout": {"generators": 1, "samples_per_prompt": 2, "share_gpu_memory": True, "engine": "vllm"}},
         "rollout.share_gpu_memory", "engine vllm reads weights from the host"),
        ({"rollout": {"generators": 1, "samples_per_prompt": 2, "share_gpu_memory": True},
          "services": {"actor": {"devices": [0]}}},
         "rollout.share_gpu_memory", "services.generator.devices is empty, so generators use the CPU"),
        ({"checkpoint": {"best_mode": "min"}}, "checkpoint.best_mode", "checkpoint.best_metric is null"),
        ({"algorithm": {**RLOO, "kl_coefficient": 0.0}, "reference": {"sync_steps": 8}}, "reference.sync_steps",
         "algorithm.kl_coefficient is 0, so only metrics depend on it"),
        ({"algorithm": {**RLOO, "kl_coefficient": 0.0, "kl_estimator": "absolute", "kl_log_probs": "trainer"}},
         "algorithm.kl_estimator, algorithm.kl_log_probs",
         "algorithm.kl_coefficient is 0, so only the metric kl_mean depends on it"),
        ({"algorithm": {**RLOO, "kl_loss": "k3", "kl_estimator": "absolute", "kl_log_probs": "trainer"}},
         "algorithm.kl_estimator", "the KL is a term of the loss, by algorithm.kl_loss k3"),
        ({"algorithm": {"estimator": "grpo", "kl_coefficient": 0.0, "kl_loss": "k2"}}, "algorithm.kl_loss",
         "algorithm.kl_coefficient, its weight, is 0"),
        ({"algorithm": {**RLOO, "length_penalty": {"free_tokens": 8}}}, "algorithm.length_penalty.free_tokens",
         "algorithm.length_penalty.per_token is 0"),
        ({"algorithm": {**RLOO, "overlong_penalty": {"penalty": 2.0}}}, "algorithm.overlong_penalty.penalty",
         "algorithm.overlong_penalty.buffer_tokens is 0"),
        ({"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_sampling_rounds": 3}},
         "rollout.max_sampling_rounds", "rollout.dynamic_sampling is off"),
        ({"algorithm": {**RLOO, "num_epochs": 1, "num_mini_batches": 1, "clip_ratio": 0.1, "target_kl": 0.1}},
         "algorithm.clip_ratio, algorithm.target_kl",
         "with one epoch, one mini-batch and old_log_probs trainer, every ratio of the update is 1"),
        ({"algorithm": {**RLOO, "policy_loss": "dppo_tv", "clip_ratio": 0.2, "clip_ratio_high": 1.0}},
         "algorithm.clip_ratio_high", "two probabilities differ by at most 1, so this limit never masks a token"),
        ({"algorithm": {**RLOO, "policy_loss": "dppo_tv", "clip_ratio": 3.0}}, "algorithm.clip_ratio",
         "two probabilities differ by at most 1, so this limit never masks a token"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_reported_with_the_reason(
    sections: dict[str, Any], keys: str, reason: str, models: Path
) -> None:
    parsed = parse_config(minimal(models, **{"algorithm": RLOO, **sections}), "test")
    assert lines(check_settings(parsed)) == [f"warning: {keys}: not used: {reason}"]


def test_settings_with_an_effect_are_not_reported(models: Path) -> None:
    sections: dict[str, Any] = {
        "algorithm": {
            "gae_lambda": 0.9, "value_clip": 0.1, "value_pretraining_steps": 1,
            "kl_controller": {"kind": "simple", "target": 3.0},
            "truncation": {"treatment": "penalty", "penalty": 2.0},
        },
        "actor": {"model": "a/b", "schedule": "linear", "final_learning_rate": 1e-6, "lora": {"rank": 2}},
        "critic": {"learning_rate": 1e-4, "schedule": "cosine", "final_learning_rate": 1e-6},
        "reference": {"model": "a/b", "dtype": "bfloat16"},
        "services": {"critic": {"num_threads": 1}, "reference": {"num_threads": 1}},
        "guards": {"critic_lost": {"action": "stop"}},
    }  # fmt: skip
    assert lines(check_settings(parse_config(minimal(models, **sections), "test"))) == []
    grpo = {
        "algorithm": {
            "estimator": "grpo",
            "estimator_parameters": {"normalize_std": False},
            "truncation": {"treatment": "scale", "scale": 0.1},
        }
    }
    assert lines(check_settings(parse_config(minimal(models, **grpo), "test"))) == []
    critic = {"critic": {"final_learning_rate": 1e-6}}
    assert lines(check_settings(parse_config(minimal(models, **critic), "test"))) == [
        "warning: critic.final_learning_rate: not used: critic.schedule is constant"
    ]


def test_in_a_complete_config_only_values_other_than_the_default_are_reported(models: Path) -> None:
    def resolved(**sections: Any) -> Config:
        (models / "config.yaml").write_text(parse_config(minimal(models, **sections), "test").to_yaml())
        return load_config(models / "config.yaml")

    actor = {"model": str(models / "policy"), "lora": {"rank": 2}}
    assert lines(check_settings(resolved(algorithm=RLOO, actor=actor))) == []
    parsed = resolved(algorithm={**RLOO, "gae_lambda": 0.9}, critic={"optimizer": {"eps": 1e-6}}, actor=actor)
    assert lines(check_settings(parsed)) == [
        f"warning: critic.optimizer.eps: not used: {NO_CRITIC}",
        f"warning: algorithm.gae_lambda: not used: {NO_CRITIC}",
    ]


def test_the_check_reports_unused_settings_last(models: Path) -> None:
    parsed = parse_config(minimal(models, algorithm=RLOO, critic={"warmup_steps": 3}), "test")
    assert check_inputs(parsed)[-1] == f"warning: critic.warmup_steps: not used: {NO_CRITIC}"
