"""Sharding of a model over the ranks of a group with FSDP2, and access to its complete tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from quartet.models.forward.log_probs import head_is_separate
from quartet.models.forward.packing import supports_packing
from quartet.models.training.activation_checkpointing import transformer_layers
from quartet.models.training.optimizer import MasterWeightAdamW
from quartet.models.value_head import ValueModel
from quartet.models.workers.group import WorkerGroup


class _Root(nn.Module):
    """The outermost sharded module. Its forward pass is any function of the model, not only the model's own forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        # The hooks of FSDP do not work on views that are changed in place.
        return tree_map_only(torch.Tensor, lambda output: output.clone() if output._is_view() else output, compute())


def shard_model(model: Any, workers: WorkerGroup, replicated: Iterable[nn.Parameter] = ()) -> None:
    """Shard the parameters of ``model`` in place, each along its first dimension. ``workers.forward`` then computes with it.

    Every transformer layer is gathered for its computation only, the other parameters for the whole pass. Trainable parameters of
    half precision become float32, and are gathered in half precision. Gradients are summed over the ranks, in float32.
    ``replicated`` parameters stay whole on every rank, in their data type. Every rank must have loaded the same weights.
    """
    # These trials are cached by model. They run forward passes, which is only possible inside the root afterwards.
    supports_packing(model)
    if not isinstance(model, ValueModel):
        head_is_separate(model)
    whole = set(replicated)
    compute_type = model.get_input_embeddings().weight.dtype
    is_half = compute_type.itemsize < torch.float32.itemsize
    for parameter in model.parameters():
        if parameter.requires_grad and is_half and parameter not in whole:
            parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(
        param_dtype=compute_type if is_half else None, reduce_dtype=torch.float32 if is_half else None
    )
    root = _Root(model)
    for module in (*transformer_layers(model), root):
        fully_shard(module, mesh=workers.mesh, mp_policy=policy, ignored_params=whole)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is its part of a sum. gloo has no other reduction than the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    workers.root, workers.compute_type = root, compute_type if is_half else None  # type: ignore[assignment]


def complete_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the complete tensor of every entry of the model's state, one after the other.

    All ranks must consume the iterator. Tied weights appear once, by their first name.
    """
    seen = set[int]()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


class ShardedAdamW(MasterWeightAdamW):
    """AdamW over this rank's shards, and over the parameters that are whole on every rank.

    Sharded parameters are float32, so they are the master weights.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], workers: WorkerGroup, **settings: Any) -> None:
        """``groups`` of the sharded model's parameters. ``settings``: see torch's AdamW."""
        self._workers = workers
        self._parameters: dict[torch.Tensor, nn.Parameter] = {}
        super().__init__(groups, **settings)

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = nn.Parameter(parameter.to_local().detach()) if isinstance(parameter, DTensor) else parameter
        self._parameters[shard] = parameter
        return shard

    def move_gradients(self) -> None:
        """Give each shard its gradient. Sum the gradients of parameters that are whole over all ranks."""
        for shard, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                gradient = parameter.grad
                shard.grad = gradient.to_local().to(shard.dtype) if isinstance(gradient, DTensor) else None
                parameter.grad = None
        gradients = [shard.grad for shard in self._whole() if shard.grad is not None]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, values in zip(gradients, parts, strict=True):
                gradient.copy_(values.view_as(gradient))

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all ranks to ``max_norm`` together, and return their norm before, []."""
        whole = [parameter.grad for parameter in self._whole() if parameter.grad is not None]
        shards = [
            shard.grad
            for shard, parameter in self._parameters.items()
            if shard is not parameter and shard.grad is not None
        ]
        device = self._workers.device
        norm = (self._workers.sum(_square_sum(shards, device)) + _square_sum(whole, device)).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(self.stepped_parameters(), max_norm, norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that were not moved yet."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters.values():
            parameter.grad = None

    def complete(self, shard: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor of which ``value`` is this rank's part, split like ``shard``. All ranks must call it."""
        parameter = self._parameters[shard]
        if not isinstance(parameter, DTensor) or value.shape != shard.shape:
            return value
        return DTensor.from_local(
            value.detach(), parameter.device_mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()

    def has_master_weight(self, shard: torch.Tensor) -> bool:
        """Return whether the model computes in another type than that of ``shard``. See ``MasterWeightAdamW``."""
        return self._workers.compute_type is not None and isinstance(self._parameters[shard], DTensor)

    def rounded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter, in the type in which the model computes."""
        kind = self._workers.compute_type
        return shard if kind is None else shard.detach().to(kind)

    def complete_shape(self, shard: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the complete parameter."""
        return tuple(self._parameters[shard].shape)

    def part(self, shard: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the complete tensor ``value``, split like ``shard``. Computes locally."""
        parameter = self._parameters[shard]
        if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        return local_part(parameter, value)

    def _whole(self) -> list[torch.Tensor]:
        return [shard for shard, parameter in self._parameters.items() if shard is parameter]


def local_part(like: DTensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the complete tensor ``value``, split like ``like``. Computes locally."""
    parts = torch.chunk(value, like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    # A copy, because a view would keep the complete tensor in memory.
    return parts[rank].clone() if rank < len(parts) else value[:0].clone()


def _square_sum(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of all squares, [], float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return total
