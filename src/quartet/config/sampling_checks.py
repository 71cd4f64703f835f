"""Conditions on the sampling of responses that depend on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.config.rollout import MAX_RESPONSES, TensorRTLLMConfig

if TYPE_CHECKING:
    from quartet.config.root import Config


def check_sampling(config: Config) -> None:
    """Raise ValueError for a setting of the sampling that the engine of the run does not support."""
    rollout = config.rollout
    if config.num_greedy_baselines:
        _check_greedy_baselines(config)
    if rollout.stop_strings and rollout.engine == "triton":
        raise ValueError(
            "rollout.stop_strings: not with engine triton, whose models cannot keep the tokens of a stop string in the response; "
            "set another rollout.engine, or remove them"
        )
    if rollout.min_p:
        if rollout.engine == "triton":
            raise ValueError(
                f"rollout.min_p {rollout.min_p:g}: models on Triton have no input for it; set min_p 0, or another rollout.engine"
            )
        sampler = (rollout.tensorrt_llm or TensorRTLLMConfig()).sampler
        if rollout.engine == "tensorrt-llm" and sampler != "TRTLLMSampler":
            raise ValueError(
                f"rollout.min_p {rollout.min_p:g}: the {sampler} of TensorRT-LLM ignores it; set min_p 0, or "
                "rollout.tensorrt_llm.sampler TRTLLMSampler"
            )


def _check_greedy_baselines(config: Config) -> None:
    algorithm, rollout = config.algorithm, config.rollout
    setting = f"algorithm.estimator {algorithm.estimator}"
    if algorithm.gamma != 1:
        raise ValueError(
            f"algorithm.gamma {algorithm.gamma}: discounts the returns of sampled responses, and not the greedy baseline that "
            f"{setting} subtracts from them; leave gamma at 1"
        )
    if algorithm.whiten_rewards:
        raise ValueError(
            "algorithm.whiten_rewards: scales the rewards of sampled responses, and not the greedy baseline that "
            f"{setting} subtracts from them; leave it false"
        )
    if not config.has_scores:
        raise ValueError(
            f"{setting}: compares the scores of sampled and greedy responses, and with reward.source none there are none; use "
            "another estimator"
        )
    if rollout.dynamic_sampling:
        raise ValueError(
            f"rollout.dynamic_sampling: compares sampled responses with each other, and {setting} compares them with a greedy "
            "one; set it to false, or use another estimator"
        )
    responses = rollout.prompts_per_step * (rollout.samples_per_prompt + 1)
    if responses > MAX_RESPONSES:
        raise ValueError(
            f"{setting}: with its greedy responses a step has {responses} responses; expected at most {MAX_RESPONSES}; lower "
            "rollout.prompts_per_step or rollout.samples_per_prompt"
        )
