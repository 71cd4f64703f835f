"""Check of the gradients of whole parameters in a model whose layers are sliced over ranks.

A comparison of hidden states does not see a whole parameter that computes with slices and that the plan does not name, such as a
norm of each head. It computes the right outputs, but each rank gets only its part of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quartet.errors import ModelError
from quartet.models.forward.model_capabilities import backbone, device_of, vocabulary_size
from quartet.models.forward.packing import TOLERANCE, hidden_states
from quartet.models.workers.group import WorkerGroup
from quartet.models.workers.tensor_parallel import REMEDY
from quartet.models.workers.workers import local_tensor

NEGLIGIBLE = 1e-4
"""Fraction of the largest gradient below which a gradient may be rounding only."""


def check_gradients(model: Any, workers: WorkerGroup) -> None:
    """Raise ModelError, on all ranks, if a whole parameter gets another gradient on each rank that computes slices of its model.

    Runs a forward and a backward pass of a few tokens with the sharded model, and clears the gradients. Parameters that are
    summed over these ranks (``workers.partial``) may differ.
    """
    if workers.tensor is None or not any(parameter.requires_grad for parameter in model.parameters()):
        return
    loss = workers.forward(lambda: _trial_loss(backbone(model)))
    if not loss.requires_grad:
        workers.end_trial()
        return
    loss.backward()  # type: ignore[no-untyped-call]
    try:
        whole = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and parameter not in workers.slicings and parameter not in workers.partial
        }
        if whole:
            _compare(model, whole, workers)
    finally:
        for parameter in model.parameters():
            parameter.grad = None


@torch.enable_grad()
def _trial_loss(base: nn.Module) -> Tensor:
    """Return a sum of the hidden states of a few tokens, [], of which none has the same weight as its neighbours."""
    hidden = hidden_states(base, torch.arange(4, device=device_of(base))[None] % vocabulary_size(base))
    weights = torch.arange(hidden.numel(), device=hidden.device, dtype=torch.float32).cos()
    return (hidden.float() * weights.view_as(hidden)).sum()


def _compare(model: Any, gradients: dict[str, Tensor], workers: WorkerGroup) -> None:
    assert workers.tensor is not None
    workers.progress.mark()
    rows = []
    for gradient in gradients.values():
        own = local_tensor(gradient).to(workers.device, torch.float32)
        low, high = own.clone(), own.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=workers.tensor.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=workers.tensor.group)
        # A rank may have no rows of a small parameter.
        rows.append([float(each.max()) if own.numel() else 0.0 for each in ((high - low), own.abs())])
    limits = torch.tensor(rows, dtype=torch.float64)
    # All ranks decide alike, also those with other shards.
    dist.all_reduce(limits, dist.ReduceOp.MAX)
    differences, sizes = limits.unbind(1)
    sizes = sizes.clamp(min=NEGLIGIBLE * float(sizes.max()))
    tolerance = TOLERANCE[workers.compute_type or torch.float32]
    # False for NaN: updates report diverged weights.
    wrong = differences > tolerance * sizes
    if wrong.any():
        name = next(name for name, is_wrong in zip(gradients, wrong.tolist(), strict=True) if is_wrong)
        others = int(wrong.sum()) - 1
        raise ModelError(
            f"tensor {workers.tensor.size}: {name}{f' and {others} more parameters' if others else ''} of the "
            f"{model.config.model_type} model would get a part of the gradient only: the plan of transformers does not say that "
            f"it computes with slices; {REMEDY}"
        )
