"""Responses of vLLM with the experts of their tokens, in a process of its own.

python -m tests.detached_engines.expert_generation MODEL DTYPE RESPONSES TOKENS FILE, with the variables of
``triton_interpreter``. FILE gets prompts, responses, log-probs and experts of each response, in NumPy's format. Prompts are
random. Fails if the weights do not arrive whole.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.engines.served_model import read_served_model
from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.engines.vllm_transfer import NAMES
from quartet.weight_transfer.tensors import HostTensor, WeightSet, combined_digest, tensor_digest


def read_weights(model: Path, dtype: str) -> WeightSet:
    """Return a checkpoint as version 1, in ``dtype``."""
    import torch
    from safetensors.torch import load_file

    tensors = {}
    for name, value in load_file(model / "model.safetensors").items():
        data = value.to(getattr(torch, dtype)).contiguous()
        tensors[name] = HostTensor(NAMES[data.dtype], tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy())
    return WeightSet(1, combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()}), tensors)


def main(model: str, dtype: str, responses: str, tokens: str, file: str) -> None:
    """Generate the responses and write them."""
    served, weights = read_served_model(model, dtype), read_weights(Path(model), dtype)
    settings = VLLMSettings(
        16, enforce_eager=True, engine_arguments={"kv_cache_memory_bytes": 256 << 20}, routed_experts=True
    )
    generator, results = np.random.default_rng(0), dict[str, Any]()
    requests = [
        GenerationRequest(
            TrajectoryId("run", 1, index, 0),
            generator.integers(2, served.vocabulary_size, generator.integers(4, 24)).astype(np.int32),
        )
        for index in range(int(responses))
    ]
    engine = VLLMEngine(settings, served)
    try:
        held = engine.load_weights(weights, weights.tensors.keys())
        assert combined_digest(held) == weights.digest
        for response in engine.generate(requests, SamplingParameters(int(tokens), ignore_eos=True), 0, lambda: False):
            index = response.request.id.prompt
            results[f"prompt-{index}"] = response.request.prompt_ids
            results[f"response-{index}"] = np.array(response.token_ids, np.int32)
            results[f"log_probs-{index}"] = np.array(response.log_probs, np.float32)
            results[f"experts-{index}"] = response.routed_experts
    finally:
        engine.close()
    np.savez(file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
