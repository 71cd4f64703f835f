"""Conditions on the sampling of responses that depend on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.config.rollout import TensorRTLLMConfig

if TYPE_CHECKING:
    from quartet.config.root import Config


def check_sampling(config: Config) -> None:
    """Raise ValueError for a setting of the sampling that the engine of the run does not support."""
    rollout = config.rollout
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
