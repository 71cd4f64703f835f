"""One rank of ``benchmarks.sharding``: loads its part of a model, updates it, and reports its memory and seconds.

python -m benchmarks.sharding_rank MODEL UPDATES OFFLOAD RANK SIZE PORT SOCKET. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from benchmarks import random_models
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings
from quartet.models.forward.model_capabilities import vocabulary_size
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.torch_settings import set_up_torch
from quartet.models.training.optimizer import MasterWeightAdamW, create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.loading import load_causal_lm
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.sharding import ShardedAdamW, shard_model
from quartet.models.workers.workers import SINGLE, Workers, local_tensor

SEQUENCES, PROMPT_TOKENS, RESPONSE_TOKENS, MICRO_BATCH_TOKENS = 4, 16, 48, 64
"""The update: each sequence is a micro-batch, so that activations stay small beside the model."""
SETTINGS = OptimizationSettings(num_epochs=1, num_mini_batches=1, learning_rate=1e-6, max_grad_norm=1.0, seed=0)
SAMPLE_SECONDS = 0.002


class PeakMemory:
    """Peak resident memory of this process while the context is open."""

    def __init__(self) -> None:
        self.start = self.peak = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process, with the pages of files that it reads."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])


def experience(model: Any) -> Experience:
    """Return random experience of ``SEQUENCES`` sequences."""
    generator = np.random.default_rng(0)
    tokens = SEQUENCES * RESPONSE_TOKENS
    ids = generator.integers(2, vocabulary_size(model), SEQUENCES * (PROMPT_TOKENS + RESPONSE_TOKENS)).astype(np.int32)
    prompts, responses = (np.full(SEQUENCES, count, np.int32) for count in (PROMPT_TOKENS, RESPONSE_TOKENS))
    values = generator.normal(size=(2, tokens)).astype(np.float32)
    return Experience(
        run="benchmark",
        step=1,
        policy_version=0,
        ids=tuple(map(str, range(SEQUENCES))),
        batch=TokenBatch(ids, prompts, responses),
        scores=np.zeros(SEQUENCES, np.float32),
        log_probs=values[0],
        reference_log_probs=values[0],
        values=values[0],
        advantages=values[1],
        returns=values[0],
        actor_mask=np.ones(tokens, np.float32),
    )


def measure(model_path: str, updates: int, offload: bool, workers: Workers) -> dict[str, Any]:
    """Return the bytes that this rank holds, its peaks above its start, and the seconds of each update after the first."""
    with PeakMemory() as memory:
        with suppress_hf_logging():
            model = load_causal_lm(model_path, workers=workers)
        # Pages of the file are in memory only once they are used.
        for parameter in model.parameters():
            local_tensor(parameter).sum()
    loading = memory.peak - memory.start
    optimizer = sharded(model, offload, workers)
    data, seconds = experience(model), list[float]()
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(p.grad.nbytes for p in optimizer.stepped_parameters() if p.grad is not None))
    )
    start = memory.start
    with PeakMemory() as memory:
        for _ in range(updates + 1):
            begin = time.perf_counter()
            update_policy(model, optimizer, data, SETTINGS, PolicyLossSettings(), MICRO_BATCH_TOKENS, workers=workers)
            seconds.append(time.perf_counter() - begin)
    moments = {
        id(p): sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        for p, state in optimizer.state.items()
    }
    return {
        "parameters": sum(local_tensor(parameter).nbytes for parameter in model.parameters()),
        "gradients": max(gradients),
        "optimizer": sum(moments.values()),
        "largest": max(moments.values()),
        "gathered": workers.gathered_bytes(),
        "loading": loading,
        "peak": memory.peak - start,
        "seconds": seconds[1:],
    }


def sharded(model: Any, offload: bool, workers: Workers) -> MasterWeightAdamW:
    """Shard ``model`` over the ``workers`` and return its optimizer."""
    if not isinstance(workers, WorkerGroup):
        return create_optimizer(model, SETTINGS.learning_rate, offload=offload)
    shard_model(model, workers, offload=offload)
    kind = partial(ShardedAdamW, workers=workers)
    return create_optimizer(model, SETTINGS.learning_rate, kind=kind, offload=offload)


def warm_up(workers: Workers) -> None:
    """Update a tiny model, so that the memory of libraries does not count."""
    config = random_models.shape(1, 64)
    config.update({"hidden_size": 28, "intermediate_size": 16})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    optimizer = sharded(model, False, workers)
    update_policy(
        model, optimizer, experience(model), SETTINGS, PolicyLossSettings(), MICRO_BATCH_TOKENS, workers=workers
    )


def main(arguments: list[str]) -> None:
    model, updates, offload, *numbers = arguments
    rank, size, port, descriptor = map(int, numbers)
    set_up_torch(1)
    workers: Workers = SINGLE
    if size > 1:
        workers = join_group(rank, size, ("127.0.0.1", port), None if rank else descriptor)
    warm_up(workers)
    report = measure(model, int(updates), bool(int(offload)), workers)
    if size > 1:
        dist.destroy_process_group()
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
