"""One rank of a group in which the policy loss fails on some ranks.

``python -m tests.unit.models.workers.failing_rank FOLDER RANK SIZE PORT SOCKET TENSOR FAILING ...``. Writes the error of the
first update, and the metrics of an update without a failure after it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quartet.errors import ComputationFailed
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.sharding import ShardedAdamW, shard_model
from quartet.ppo.losses import PolicyLoss, PolicyLossInput, checked_policy_loss
from quartet.ppo.policy_losses import clipped
from tests.unit.models import tiny, updates

MAX_TOKENS = 8
"""Few enough for several micro-batches on each rank."""


def main(
    folder: Path, rank: int, size: int, port: int, descriptor: int | None, tensor: int, failing: list[int]
) -> None:
    torch.set_num_threads(1)
    join_group(rank, size, ("127.0.0.1", port), descriptor, timeout=30)
    workers = WorkerGroup(torch.device("cpu"), tensor=tensor)
    model: Any = tiny.causal("llama")
    data = updates.experience(model)
    shard_model(model, workers)
    optimizer = create_optimizer(model, 1e-3, kind=partial(ShardedAdamW, workers=workers))
    calls = []

    def loss(inputs: PolicyLossInput) -> PolicyLoss:
        calls.append(0)
        # The first call is the trial, before the update.
        if rank in failing and len(calls) == 2:
            raise ValueError(f"wrong data {'x' * 1000}")
        return clipped(inputs)

    checked = checked_policy_loss(loss, "algorithm.policy_loss x")
    update = partial(update_policy, model, optimizer, data, updates.settings(), updates.with_options(), MAX_TOKENS)
    error = ""
    try:
        update(checked, workers)
    except ComputationFailed as raised:
        error = str(raised)
    metrics = update(clipped, workers)
    (folder / f"{rank}.json").write_text(json.dumps({"error": error, "metrics": metrics}))


if __name__ == "__main__":
    number, count, address, listener, slices, *ranks = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), number, count, address, None if number else listener, slices, ranks)
