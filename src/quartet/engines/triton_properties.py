"""Guarantees of a Triton Inference Server as a generation engine. The client itself is in the actor's process."""

from __future__ import annotations

from typing import Literal

from quartet.engines.engine import EngineProperties

TritonDialect = Literal["tokens", "llmapi", "vllm"]
"""Tensors of a served model: token ids (TensorRT-LLM's backend up to 1.2), its ``llmapi`` model, or vLLM's backend."""


def triton_properties(
    dialect: TritonDialect | None, weights: Literal["lora", "static"], reports_log_probs: bool
) -> EngineProperties:
    """Return the guarantees of a served model, or of any with dialect None.

    ``reports_log_probs`` is True only if the model reports them at every temperature.
    The token-id backend and vLLM read the seed of a request. The sampler of ``llmapi`` has one random generator for all requests.
    """
    return EngineProperties(
        name=f"triton ({dialect}, {weights})" if dialect else "triton",
        seeded=dialect in ("tokens", "vllm"),
        batch_invariant=False,
        log_probs="whole" if reports_log_probs else "none",
        weights="adapter" if weights == "lora" else "static",
        digest="none",
    )
