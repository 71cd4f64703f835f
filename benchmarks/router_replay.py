"""Difference between vLLM and the trainer for a small mixture of experts in bfloat16, with router replay and without.

python -m benchmarks router_replay [--vllm PYTHON] [--responses N] [--tokens N] generates with vLLM in its own environment (`make
engines` installs one for CPUs) and scores in this one. The model is a Qwen3-MoE with random weights: 8 layers, 32 experts, 4 per
token. On a CPU, Triton's interpreter computes the kernels with which vLLM records experts, so generation is slow; the kernels of
experts and attention are those of any run.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import machine
from benchmarks.options import parser_of, positive
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory, TrajectoryId
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings, RolloutCorrection
from quartet.models.forward.router_replay import routers_of
from quartet.models.training.updates import update_policy
from quartet.models.weights.loading import load_causal_lm
from tests.detached_engines.triton_interpreter import environment

DTYPE = "bfloat16"
METRICS = ("rollout_mismatch_kl", "importance_weight_max", "importance_truncated_fraction", "importance_ess")


def save_model(folder: Path) -> None:
    """Save a model with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def generate(python: str, folder: Path, responses: int, tokens: int) -> list[Trajectory]:
    """Return responses of vLLM with the experts of their tokens."""
    file, module = folder / "responses.npz", "tests.detached_engines.expert_generation"
    command = [python, "-m", module, str(folder / "model"), DTYPE, str(responses), str(tokens), str(file)]
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **environment(folder / "triton")}
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    found = np.load(file)
    return [
        dataclasses.replace(
            Trajectory.of_response(
                TrajectoryId("run", 1, index, 0),
                0,
                found[f"prompt-{index}"],
                found[f"response-{index}"],
                found[f"log_probs-{index}"],
                FinishReason.LENGTH,
            ),
            routed_experts=found[f"experts-{index}"],
        )
        for index in range(responses)
    ]


def metrics(model: Any, trajectories: Sequence[Trajectory], replay: bool) -> dict[str, float]:
    """Return the metrics of an update that leaves the weights as they are."""
    batch = (TokenBatch.of_policy if replay else TokenBatch.of)(trajectories)
    log_probs = np.concatenate([item.log_probs for item in trajectories])
    nothing, ones = np.zeros_like(log_probs), np.ones_like(log_probs)
    ids = tuple(str(item.id) for item in trajectories)
    scores = np.zeros(len(ids), np.float32)
    experience = Experience("run", 1, 0, ids, batch, scores, log_probs, nothing, nothing, ones, nothing, ones)
    loss = PolicyLossSettings(rollout_correction=RolloutCorrection("token", upper=2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return update_policy(model, optimizer, experience, OptimizationSettings(0, 1, 0.0, 1.0, 0), loss, 4096)


def other_experts(model: Any, trajectories: Sequence[Trajectory]) -> tuple[float, float, int]:
    """Return the share of choices, one per token and layer, in which the trainer's routers differ; of tokens; and all tokens."""
    routers, different = routers_of(model), []
    for item in trajectories:
        ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids])[:-1].astype(np.int64))
        with torch.no_grad(), routers.recording() as last:
            model(input_ids=ids[None], use_cache=False)
            chosen = last().numpy()
        assert item.routed_experts is not None
        different.append((np.sort(chosen, -1) != np.sort(item.routed_experts, -1)).any(-1))
    choices = np.concatenate(different)
    return float(choices.mean()), float(choices.any(-1).mean()), len(choices)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("router_replay", __doc__)
    parser.add_argument("--vllm", default="build/vllm-venv/bin/python", help="Python of an environment with vLLM")
    parser.add_argument("--responses", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=64)
    options = parser.parse_args(arguments)
    print(machine.describe())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model")
        trajectories = generate(options.vllm, folder, options.responses, options.tokens)
        model = load_causal_lm(folder / "model", DTYPE)
        without, replayed = (metrics(model, trajectories, replay) for replay in (False, True))
        choices, affected, tokens = other_experts(model, trajectories)
    print(f"\n{tokens} tokens; other experts for {choices:.1%} of the choices, at {affected:.1%} of the tokens\n")
    print("| metric | own experts | those of vLLM |\n|---|---|---|")
    for name in METRICS:
        print(f"| `{name}` | {without[name]:.3g} | {replayed[name]:.3g} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
