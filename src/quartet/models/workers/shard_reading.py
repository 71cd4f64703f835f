"""Reading of a checkpoint by all ranks of a group, each of which reads and holds only its part of every parameter.

Each parameter then is a DTensor that is split along its first dimension, and has no place in FSDP yet: see ``shard_model``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import structlog
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

from quartet.models.weights.towers import before_reading
from quartet.models.workers.group import WorkerGroup

_Module = TypeVar("_Module", bound=nn.Module)

log = structlog.get_logger()


def read_in_parts(read: Callable[[str], _Module], device: str, workers: WorkerGroup, in_turn: bool = False) -> _Module:
    """Return the model of ``read``, a load with transformers to a device, with this rank's part of every parameter on ``device``.

    transformers creates the model without memory, and this rank reads its part of each tensor from the files. ``in_turn``: one
    rank after the other reads the complete model into host memory and keeps its part, for models that transformers cannot read
    in parts. Raises the errors of ``read``.
    """
    if not in_turn:
        split = False

        def split_parameters(model: nn.Module) -> None:
            nonlocal split
            whole = _read_whole(model, workers.shards.size())
            # transformers reads a parameter that is a DTensor in parts.
            replace_parameters(
                model, lambda parameter: None if parameter in whole else _without_memory(parameter, workers.shards)
            )
            split = True

        with before_reading(split_parameters):
            model = read(device)
        if split:
            return model
        del model
        log.warning("the ranks read the complete model in turn: this release of transformers does not read it in parts")

    def read_and_keep_part() -> _Module | None:
        model = read("cpu")
        replace_parameters(model, lambda parameter: _part_of(parameter, workers.shards))
        return model.to(device)

    results = [
        workers.agreed(read_and_keep_part if rank == workers.rank else lambda: None) for rank in range(workers.size)
    ]
    result = results[workers.rank]
    assert result is not None
    return result


def replace_parameters(model: nn.Module, replacement: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Replace parameters of ``model``, except those for which ``replacement`` returns None. Tied parameters stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                value = replacement(parameter)
                replaced[parameter] = (
                    parameter if value is None else nn.Parameter(value, requires_grad=parameter.requires_grad)
                )
            setattr(module, name, replaced[parameter])


def local_slices(like: DTensor) -> tuple[slice, ...]:
    """Return the place of this rank's part in the complete tensor of ``like``."""
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def with_part(like: DTensor, part: torch.Tensor) -> DTensor:
    """Return a tensor that is split like ``like``, of which this rank has ``part``."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _part_of(parameter: torch.Tensor, mesh: DeviceMesh) -> DTensor | None:
    empty = _without_memory(parameter, mesh)
    # A copy, because a view would keep the complete tensor in memory.
    return None if empty is None else with_part(empty, parameter.detach()[local_slices(empty)].clone())


def _without_memory(parameter: torch.Tensor, mesh: DeviceMesh) -> DTensor | None:
    """Return the meta tensor of this rank's part of ``parameter``, split along the first dimension. None for a single row."""
    if parameter.ndim == 0 or parameter.shape[0] == 1:
        return None
    complete = torch.empty_like(parameter, device="meta")
    size, _ = compute_local_shape_and_global_offset(complete.shape, mesh, [Shard(0)])
    return DTensor.from_local(
        complete.new_empty(size), mesh, [Shard(0)], run_check=False, shape=complete.shape, stride=complete.stride()
    )


def _read_whole(model: nn.Module, ranks: int) -> set[nn.Parameter]:
    """Return the parameters that transformers makes of other tensors in a checkpoint, and cannot make of their parts.

    It converts the parts that a rank reads. This needs operations that keep the rows of each tensor apart. A part of a stack of
    several tensors, such as experts, needs at least one of them.
    """
    results = set[nn.Parameter]()
    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]  # type: ignore[arg-type]
    for converter in converters:
        keeps_rows = all(isinstance(each, MergeModulelist) or _keeps_rows(each) for each in converter.operations)
        stacks = any(isinstance(each, MergeModulelist) for each in converter.operations)
        # A target may refer to groups of the source's pattern.
        target = re.compile("|".join(re.sub(r"\\\\\d", ".*", re.escape(each)) for each in converter.target_patterns))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            rows = parameter.shape[0] if parameter.ndim else 1
            is_spread = not stacks or -(-rows // ranks) * (ranks - 1) < rows
            if not (keeps_rows and is_spread) and target.search(name):
                results.add(parameter)
    return results


def _keeps_rows(operation: ConversionOps) -> bool:
    """Return whether an operation on a tensor gives row n of the result from row n alone. False if it does not say so."""
    dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
    return bool(dims) and min(dims) > 0
