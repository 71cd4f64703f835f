"""One rank of a group of processes that updates tiny models.

``python -m tests.unit.models.workers.rank FOLDER RANK SIZE PORT SOCKET``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from quartet.models.forward.scoring import response_log_probs, response_values
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.sharding import ShardedAdamW, complete_weights, shard_model
from quartet.models.workers.workers import Workers
from quartet.types import ValueLossSettings
from tests.unit.models import tiny, updates

STEPS = 5
RATE, EPS = 1e-3, 1e-5
RLOO = {"aggregation": "sequence_mean", "ratio_level": "sequence", "kl_loss": "none", "entropy_coefficient": 0.0}
CASES = ("ppo", "rloo", "ppo-lora", "rloo-lora", "value", "gpt2", "tied", "bfloat16", "few-tokens", "not-finite")
REPEATED = ("ppo", "rloo-lora", "value")


def again(case: str) -> str:
    """Return the name of the results of a second run of a case."""
    return f"{case}-again"


def run(case: str, workers: Workers) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights and the metrics after the updates of a case."""
    kind = {"gpt2": "gpt2", "tied": "qwen2"}.get(case, "llama")
    model: Any = tiny.causal(kind)
    data = updates.experience(model)
    replicated: list[Any] = []
    if case == "value":
        model = ValueModel.of_causal_lm(model)
        replicated = list(model.head.parameters())
    if case.endswith("lora"):
        adapter = add_adapter(model, "base", 4, 8.0)
        replicated = list(adapter.parameters())
    if case == "bfloat16":
        model = model.bfloat16()
    loss = updates.with_options(**RLOO) if case.startswith("rloo") else updates.with_options(target_kl=0.5)
    if case.startswith("rloo"):
        data = updates.with_outcome_advantages(data)
    if case == "not-finite":
        advantages = data.advantages.copy()
        advantages[2] = np.inf
        data = dataclasses.replace(data, advantages=advantages, actor_mask=np.ones_like(data.actor_mask))
    optimizer: Any
    if isinstance(workers, WorkerGroup):
        shard_model(model, workers, replicated)
        optimizer = create_optimizer(model, RATE, eps=EPS, kind=partial(ShardedAdamW, workers=workers))
    else:
        optimizer = create_optimizer(model, RATE, eps=EPS)
    metrics: dict[str, Any] = {}
    settings = updates.settings(learning_rate=RATE, skip_non_finite=case == "not-finite")
    for step in range(STEPS):
        with activation_checkpointing(model, case == "rloo"):
            if case == "value":
                result = update_value(model, optimizer, data, settings, ValueLossSettings(0.2), 12, workers)
            else:
                tokens = 4 if case == "few-tokens" else 20
                result = update_policy(model, optimizer, data, settings, loss, tokens, workers=workers)
        metrics |= {f"{step}/{name}": value for name, value in result.items()}
    if case == "value":
        scores = response_values(model, data.batch, 20, workers)
    else:
        scores = response_log_probs(model, data.batch, 0.8, 20, workers)
    return {**dict(complete_weights(model)), "scores": torch.from_numpy(scores)}, metrics


def main(folder: Path, rank: int, size: int, port: int, descriptor: int | None) -> None:
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")
    join_group(rank, size, ("127.0.0.1", port), descriptor)
    for case in [*CASES, *map(again, REPEATED)]:
        weights, metrics = run(case.removesuffix("-again"), WorkerGroup(torch.device("cpu")))
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in weights.items()}, folder / f"{case}-{rank}.safetensors"
        )
        (folder / f"{case}-{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    number, count, address, listener = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), number, count, address, None if number else listener)
