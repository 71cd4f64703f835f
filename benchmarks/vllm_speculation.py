"""Greedy tokens per second of vLLM on a CPU, with n-gram speculation and without, in turns.

python -m benchmarks.vllm_speculation MODEL PROMPTS [--prompts N] [--tokens N] [--rounds N] [--draft N] needs an environment with
vLLM (`make engines` installs one for CPUs: build/vllm-venv/bin/python), a checkpoint in float32 with its tokenizer, and JSON
Lines with a `text` each. Fails if a response differs. Prints the medians of the two rates, and their ratio in each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.options import positive
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.engines.served_model import read_served_model
from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.weight_transfer.tensors import HostTensor, WeightSet, combined_digest, tensor_digest


def read_weights(model: Path) -> WeightSet:
    """Return a checkpoint in float32 as version 1."""
    from safetensors.numpy import load_file

    arrays = {name: array for file in sorted(model.glob("*.safetensors")) for name, array in load_file(file).items()}
    tensors = {
        n: HostTensor("F32", a.shape, np.ascontiguousarray(a).reshape(-1).view(np.uint8)) for n, a in arrays.items()
    }
    return WeightSet(1, combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()}), tensors)


def read_requests(model: Path, prompts: Path, count: int) -> list[GenerationRequest]:
    """Return requests for the first prompts of a file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = prompts.read_text(encoding="utf-8").splitlines()[:count]
    ids = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    return [GenerationRequest(TrajectoryId("run", 0, i, 0), np.array(each, np.int32)) for i, each in enumerate(ids)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_speculation", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts_file", metavar="PROMPTS", type=Path)
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--draft", type=positive, default=4, help="num_speculative_tokens")
    options = parser.parse_args(arguments)
    weights, batch = read_weights(options.model), read_requests(options.model, options.prompts_file, options.prompts)
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": options.draft,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    served = read_served_model(str(options.model), "float32")
    sampling = SamplingParameters(options.tokens, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        engines = []
        for each in ({}, speculative):
            arguments_of_vllm: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20}
            settings = VLLMSettings(16, enforce_eager=True, engine_arguments=arguments_of_vllm, speculative=each)
            engines.append(VLLMEngine(settings, served))
            stack.callback(engines[-1].close)
            engines[-1].load_weights(weights, weights.tensors.keys())
        rates: list[list[float]] = [[], []]
        for number in range(options.rounds + 1):
            found = []
            for engine, kept in zip(engines, rates, strict=True):
                start = time.perf_counter()
                responses = list(engine.generate(batch, sampling, number, lambda: False))
                seconds = time.perf_counter() - start
                tokens = {response.request.id: list(response.token_ids) for response in responses}
                found.append(tokens)
                if number:  # The first round warms up.
                    kept.append(sum(map(len, tokens.values())) / seconds)
            assert found[0] == found[1], "speculation changed a greedy token"
    ratios = [with_it / without for without, with_it in zip(*rates, strict=True)]
    report = {
        "machine": machine.describe(),
        "responses": len(batch),
        "tokens": options.tokens,
        "tokens_per_second": round(statistics.median(rates[0]), 1),
        "with_speculation": round(statistics.median(rates[1]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
