"""The slices of a model's weights that each rank of a group publishes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from quartet.models.weights.host_tensors import host_bytes, layout_of
from quartet.models.workers.group import WorkerGroup
from quartet.models.workers.sharding import part_of
from quartet.weight_transfer.slices import TensorSlice
from quartet.weight_transfer.tensors import BLOCK_BYTES, Bytes


def weight_slices(weights: Mapping[str, torch.Tensor], workers: WorkerGroup) -> list[TensorSlice]:
    """Return what this rank publishes of each weight, in the type in which the model computes.

    That is the rank's own shard. Weights that are sliced along another dimension than the first are no contiguous ranges. Each of
    them is made whole on all ranks for a moment, of which each publishes a part.
    """
    return [_slice(name, value, workers) for name, value in weights.items()]


def _slice(name: str, value: torch.Tensor, workers: WorkerGroup) -> TensorSlice:
    part = part_of(value, workers)
    dtype = workers.compute_type if isinstance(value, DTensor) and workers.compute_type is not None else value.dtype
    layout = layout_of(name, dtype, part.shape)
    slicing = workers.slicings.get(value)
    if slicing is not None and slicing.dim > 0:
        step = -(-layout.num_bytes // (workers.size * BLOCK_BYTES)) * BLOCK_BYTES
        begin, end = (min(layout.num_bytes, step * each) for each in (workers.rank, workers.rank + 1))
        return TensorSlice(layout, begin, end - begin, lambda: host_bytes(workers.complete(value))[begin:end])
    rows = part.shape[0] if part.shape else 1
    begin = layout.num_bytes // rows * part.offsets[0] if part.shape and rows else 0
    local = part.tensor if part.saved_here else part.tensor.flatten()[:0]

    def read() -> Bytes:
        return host_bytes(local.to(dtype))

    return TensorSlice(layout, begin, local.numel() * dtype.itemsize, read)
