"""One rank of a group that loads models in parts, and reports what it holds.

``python -m tests.unit.models.workers.reading_rank FOLDER RANK SIZE PORT SOCKET REPLICATE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist

from quartet.config.models import LoraConfig
from quartet.models.training.update_memory import measure_policy, measure_value
from quartet.models.weights.loading import check_causal_lm, check_critic, load_causal_lm, load_critic
from quartet.models.weights.lora import add_adapter
from quartet.models.workers import shard_reading
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.sharding import complete_weights, shard_model
from quartet.models.workers.workers import Workers, local_tensor
from tests.unit.models import tiny

HYBRIDS = ("olmo_hybrid", "lfm2")
"""Models with convolutions. The checkpoint of the first one has those of queries, keys and values apart, the model has one."""
QUICK = (
    "llama-bfloat16",
    "qwen2-float32",
    "llama-lora",
    "critic-of-reward",
    "qwen2_audio-float32",
    "olmo_hybrid-float32",
)
CASES = (
    *(f"{kind}-{dtype}" for kind in (*tiny.KINDS, *tiny.MIXTURES, *HYBRIDS) for dtype in ("float32", "bfloat16")),
    "llama-adapter",
    "llama-lora",
    "critic-of-llama",
    "critic-of-reward",
    "critic-of-critic",
    "qwen2_audio-float32",
)
"""The last one is a multimodal model with a tower that stays."""


def load(case: str, folder: Path, workers: Workers) -> tuple[Any, list[Any]]:
    """Return the model of a case, and its parameters that stay whole."""
    if case.startswith("critic"):
        model: Any = load_critic(folder / case.removeprefix("critic-of-"), "float32", "cpu", workers)
        return model, list(model.head.parameters())
    kind, _, option = case.partition("-")
    name, dtype = (case, "float32") if option == "adapter" else (kind, "float32" if option == "lora" else option)
    model = load_causal_lm(folder / name, dtype, "cpu", workers)
    return model, list(
        add_adapter(model, "base", LoraConfig(rank=2, alpha=4.0), 5).parameters()
    ) if option == "lora" else []


def state(case: str, folder: Path, workers: Workers) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the complete weights of a case, and what this rank holds and has measured."""
    with mock.patch.object(shard_reading, "_part_of", side_effect=shard_reading._part_of) as cut:
        model, whole = load(case, folder, workers)
    if isinstance(workers, WorkerGroup):
        shard_model(model, workers, whole)
        check = check_critic if case.startswith("critic") else check_causal_lm
        workers.evaluate(lambda: check(case, model))
    measured = (
        measure_value(model, 20, workers) if case.startswith("critic") else measure_policy(model, 20, "report", workers)
    )
    report = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "held": sum(local_tensor(parameter).numel() for parameter in model.parameters()),
        "activations": [measured.plain.bytes(tokens, 20) for tokens in (20, 200)],
        "read_whole": cut.called,
    }
    buffers = {f"buffer {name}": value for name, value in model.named_buffers()}
    return {**dict(complete_weights(model, workers)), **buffers}, report


def main(folder: Path, rank: int, size: int, port: int, descriptor: int | None, replicate: int) -> None:
    torch.set_num_threads(1)
    join_group(rank, size, ("127.0.0.1", port), descriptor)
    for case in (folder / "cases").read_text().split():
        weights, report = state(case, folder, WorkerGroup(torch.device("cpu"), replicate))
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in weights.items()}, folder / f"{case}-{rank}.safetensors"
        )
        (folder / f"{case}-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    number, count, address, listener, copies = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), number, count, address, None if number else listener, copies)
