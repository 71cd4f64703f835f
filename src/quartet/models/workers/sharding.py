"""Sharding of a model over the ranks of a group with FSDP2, and access to its complete tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from quartet.errors import ModelError
from quartet.models.forward.log_probs import head_is_separate
from quartet.models.forward.model_capabilities import backbone, device_of, is_encoder_classifier, vocabulary_size
from quartet.models.forward.packing import TOLERANCE, hidden_states, supports_packing
from quartet.models.training.activation_checkpointing import transformer_layers
from quartet.models.training.optimizer import MasterWeightAdamW
from quartet.models.value_head import ValueModel
from quartet.models.weights.saved_state import Part, SavedState, check_shapes
from quartet.models.workers.group import WorkerGroup
from quartet.models.workers.progress import Progress
from quartet.models.workers.shard_reading import local_slices, replace_parameters, with_part
from quartet.models.workers.tensor_parallel import REMEDY, check_slices, slice_layers
from quartet.models.workers.workers import Workers, local_tensor


class _Root(nn.Module):
    """The outermost sharded module. Its forward pass is any function of the model, not only the model's own forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        # The hooks of FSDP do not work on views that are changed in place.
        return tree_map_only(torch.Tensor, lambda output: output.clone() if output._is_view() else output, compute())


def shard_model(
    model: Any, workers: WorkerGroup, replicated: Iterable[nn.Parameter] = (), offload: bool = False
) -> None:
    """Shard the parameters of ``model`` in place, each along its first dimension. ``workers.forward`` then computes with it.

    Every transformer layer is gathered for its computation only, the other parameters, and layers that share parameters with
    others, for the whole pass. Trainable parameters of
    half precision become float32, and are gathered in half precision. Gradients are summed over the ranks, in float32.
    ``replicated`` parameters stay whole on every rank, in their data type. Every rank must have loaded the same weights: all of
    them, or its parts with ``read_in_parts``. ``offload``: keep the shards on a GPU, and their gradients, in host memory. The
    layers are sliced first, if the group has ranks for that: see ``slice_layers``, ``check_slices`` and ``check_gradients``, also
    for their errors.
    A model in host memory is moved to the device of the group layer by layer: a GPU then holds its shards, and at most one
    complete layer or the parameters outside the layers.
    """
    sliced = None if workers.tensor is None else slice_layers(model, workers.tensor)
    whole = set(replicated)
    for parameter in whole:
        # FSDP moves the others, and the buffers, when it shards their module.
        parameter.data = parameter.data.to(workers.device)
    compute_type = model.get_input_embeddings().weight.dtype
    is_half = compute_type.itemsize < torch.float32.itemsize
    read = _take_parts(model, is_half)
    for parameter in model.parameters():
        if parameter.requires_grad and is_half and parameter not in whole and not parameter.is_meta:
            parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(
        param_dtype=compute_type if is_half else None, reduce_dtype=torch.float32 if is_half else None
    )
    root = _Root(model)
    memory = CPUOffloadPolicy() if offload and workers.device.type == "cuda" else OffloadPolicy()
    for module in (*_units(model), root):
        fully_shard(module, mesh=workers.mesh, mp_policy=policy, offload_policy=memory, ignored_params=whole)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is its part of a sum. gloo has no other reduction than the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _give_back(root, read)
    _mark_layers(model, workers.progress)
    workers.root, workers.compute_type = root, compute_type if is_half else None  # type: ignore[assignment]
    if sliced is not None and workers.tensor is not None:
        # FSDP has replaced the parameters by others of the same names.
        parameters = dict(model.named_parameters())
        workers.slicings = {parameters[name]: slicing for name, slicing in sliced.slicings.items()}
        workers.partial = {parameters[name] for name in sliced.partial}
        expected, group = sliced.expected, workers.tensor
        workers.evaluate(lambda: check_slices(model, group, expected))
        check_gradients(model, workers)
    # These trials are cached by model. Later they would run in the middle of another pass.
    if not is_encoder_classifier(model):
        workers.evaluate(lambda: supports_packing(model))
    if not isinstance(model, ValueModel):
        workers.evaluate(lambda: head_is_separate(model))


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the layers to gather one at a time, inner ones first: all that share no parameter with a module outside of them."""
    uses = _count_uses(model)
    return [
        layer
        for layer in reversed(transformer_layers(model))
        if all(uses[parameter] == count for parameter, count in _count_uses(layer).items())
    ]


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _mark_layers(model: Any, progress: Progress) -> None:
    """Mark the progress of this rank at the forward pass and at the backward pass of every transformer layer."""
    for number, layer in enumerate(transformer_layers(model), 1):
        forward, backward = f"forward pass of layer {number}", f"backward pass of layer {number}"
        layer.register_forward_pre_hook(lambda *_, place=forward: progress.mark(place))
        layer.register_forward_hook(partial(_mark_backward, progress, backward))


def _mark_backward(progress: Progress, place: str, layer: nn.Module, arguments: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad:
        hidden.register_hook(lambda _: progress.mark(place))


Place = tuple[nn.Module, str]
"""A module and the name of its parameter."""


def _take_parts(model: nn.Module, is_half: bool) -> dict[Place, DTensor]:
    """Replace the parameters that were read in parts by complete ones without memory, as FSDP expects them. Return the parts.

    Trainable parameters of half precision become float32.
    """
    places: dict[nn.Parameter, Place] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                places.setdefault(parameter, (module, name))

    def without_memory(parameter: nn.Parameter) -> torch.Tensor | None:
        kind = torch.float32 if is_half and parameter.requires_grad else parameter.dtype
        return torch.empty(parameter.shape, dtype=kind, device="meta") if parameter in places else None

    replace_parameters(model, without_memory)
    return {place: parameter for parameter, place in places.items() if isinstance(parameter, DTensor)}


def _give_back(root: nn.Module, read: dict[Place, DTensor]) -> None:
    """Give the sharded parameters of ``root`` the parts that were read. Empties ``read``."""
    values: dict[nn.Parameter, DTensor] = {}
    while read:
        (module, name), part = read.popitem()
        parameter = getattr(module, name)
        # The mesh of a parameter may also have copies, before the ranks of the shards.
        same = part.placements == parameter.placements[-1:] and part.device_mesh.size() == parameter.device_mesh.size(
            -1
        )
        local = local_tensor(part) if same else part.full_tensor().detach()[local_slices(parameter)]
        values[parameter] = with_part(parameter, local.to(parameter.dtype))
    replace_parameters(root, values.get)
    # FSDP takes the new parameters over whenever a module is moved or converted.
    root._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def complete_weights(model: nn.Module, workers: Workers) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the complete tensor of every entry of the model's state, one after the other.

    All ranks must consume the iterator. Tied weights appear once, by their first name.
    """
    for name, value in distinct_state(model):
        complete = value.detach()
        if isinstance(value, DTensor) and isinstance(workers, WorkerGroup):
            complete = workers.unsliced(value, value.full_tensor().detach())
        yield name, complete


class ShardedAdamW(MasterWeightAdamW):
    """AdamW over this rank's shards, and over the parameters that are whole on every rank.

    Sharded parameters are float32, so they are the master weights.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], workers: WorkerGroup, **settings: Any) -> None:
        """``groups`` of the sharded model's parameters. ``settings``: see ``MasterWeightAdamW``."""
        self._workers = workers
        self._parameters: dict[torch.Tensor, nn.Parameter] = {}
        super().__init__(groups, **settings)

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = nn.Parameter(parameter.to_local().detach()) if isinstance(parameter, DTensor) else parameter
        self._parameters[shard] = parameter
        return shard

    def move_gradients(self) -> None:
        """Give each shard its gradient. Sum the gradients that FSDP does not sum: those of parameters that are whole over all
        ranks, and partial ones over the ranks that compute slices of the same layers."""
        for shard, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                gradient = parameter.grad
                shard.grad = gradient.to_local().to(shard.dtype) if isinstance(gradient, DTensor) else None
                parameter.grad = None
        tensor, partial = self._workers.tensor, self._workers.partial
        whole = [(shard, shard.grad) for shard in self._whole() if shard.grad is not None]
        if tensor is not None:
            _sum_in_place(
                [
                    shard.grad
                    for shard, parameter in self._parameters.items()
                    if parameter in partial and shard is not parameter and shard.grad is not None
                ],
                tensor.group,
            )
            for shard, gradient in whole:
                if tensor.rank and shard not in partial:
                    # The first rank counts for all that have computed the same.
                    gradient.zero_()
        _sum_in_place([gradient for _, gradient in whole])

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all ranks to ``max_norm`` together, and return their norm before, []."""
        total = torch.zeros((), dtype=torch.float64, device=self._workers.device)
        for shard, parameter in self._parameters.items():
            if shard.grad is not None and part_of(parameter, self._workers).saved_here:
                total += torch.linalg.vector_norm(shard.grad, dtype=torch.float64).square()
        self._workers.progress.mark()
        dist.all_reduce(total)
        norm = total.sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(self.stepped_parameters(), max_norm, norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that were not moved yet."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters.values():
            parameter.grad = None

    def part(self, stepped: torch.Tensor, value: torch.Tensor) -> Part:
        """Return ``value``, an entry of the state of ``stepped``, as this rank's part of a tensor."""
        if value.shape == stepped.shape:
            return part_of(self._parameters[stepped], self._workers).of(value)
        return Part.whole(value, self._workers.rank == 0)

    def has_master_weight(self, shard: torch.Tensor) -> bool:
        """Return whether the model computes in another type than that of ``shard``. See ``MasterWeightAdamW``."""
        return self._workers.compute_type is not None and isinstance(self._parameters[shard], DTensor)

    def rounded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter, in the type in which the model computes."""
        kind = self._workers.compute_type
        return shard if kind is None else shard.detach().to(kind)

    def complete_shape(self, shard: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the complete parameter."""
        parameter = self._parameters[shard]
        shape, slicing = list(parameter.shape), self._workers.slicings.get(parameter)
        if slicing is not None:
            shape[slicing.dim] = slicing.size
        return tuple(shape)

    def _whole(self) -> list[torch.Tensor]:
        return [shard for shard, parameter in self._parameters.items() if shard is parameter]


def part_of(value: torch.Tensor, workers: Workers) -> Part:
    """Return the part of a weight that this rank has, as a view. The lowest of the ranks that have it saves it."""
    if not isinstance(workers, WorkerGroup):
        return Part.whole(value.detach())
    slicing, tensor = workers.slicings.get(value), workers.tensor
    shape, offsets, local = list(value.shape), [0] * value.ndim, value.detach()
    saved_here = workers.data_rank == 0
    if isinstance(value, DTensor):
        offsets, local = [place.start for place in local_slices(value)], value.to_local().detach()
        saved_here = workers.data_rank < workers.mesh.size(-1)
    if tensor is not None and slicing is None:
        saved_here = saved_here and tensor.rank == 0
    elif tensor is not None and slicing is not None:
        shape[slicing.dim] = slicing.size
        offsets[slicing.dim] += tensor.bounds(slicing.size)[0]
    return Part(local, tuple(shape), tuple(offsets), saved_here)


def host_parts(model: nn.Module, workers: WorkerGroup) -> dict[str, Part]:
    """Copy this rank's parts of the model's state into host memory, in the type in which the model computes.

    Tied weights appear once, by their first name. The result has only parts that this rank saves. Frozen weights that are in host
    memory already are not copied, because nothing changes them.
    """
    parts = {}
    for name, value in distinct_state(model):
        part = part_of(value, workers)
        if part.saved_here:
            kind = workers.compute_type if isinstance(value, DTensor) else None
            tensor = part.tensor if kind is None else part.tensor.to(kind)
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            parts[name] = part.of(tensor.to("cpu", copy=tensor is part.tensor and not frozen).contiguous())
    return parts


def distinct_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the entries of the model's state, tied weights once, by their first name."""
    seen = dict[int, tuple[str, torch.Tensor]]()
    for name, value in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(value), (name, value))
    return list(seen.values())


def read_weights(model: nn.Module, saved: SavedState, workers: Workers) -> None:
    """Set the weights to those of a checkpoint, of which this rank reads its parts. Raises ModelError for another model's."""
    parts = {name: part_of(value, workers) for name, value in distinct_state(model)}
    check_shapes(saved, {name: part.shape for name, part in parts.items()})
    saved.read(parts)


def _sum_in_place(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its sum over the ranks of ``group``, or over all ranks, in one exchange."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


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
