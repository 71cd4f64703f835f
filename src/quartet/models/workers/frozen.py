"""Frozen models that the ranks of a group hold together."""

from __future__ import annotations

from copy import copy
from typing import Any

from quartet.models.workers.workers import Workers


def shard_frozen(model: Any, workers: Workers) -> Workers:
    """Shard the parameters of ``model`` over the ranks, in their data type. Return the group that computes with it.

    A group of one keeps the model as it is. A group may hold several models. Every rank must have loaded the
    same weights, or its parts of them.
    """
    if workers.size == 1:
        return workers
    # Imported here because a single process does not need torch.distributed.
    from quartet.models.workers.group import WorkerGroup
    from quartet.models.workers.sharding import shard_model

    assert isinstance(workers, WorkerGroup)
    own = copy(workers)
    shard_model(model.requires_grad_(False), own)
    return own
