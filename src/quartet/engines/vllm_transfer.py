"""vLLM's weight transfer from shared memory: the backend that its processes load weights with. Needs torch and vLLM.

``vllm_worker`` registers it under the name BACKEND. Each process maps the memory that the weights are in, so nothing is sent or
copied in between. vLLM's layer-wise reload copies from there to the parameters that it computes with.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from quartet.weight_transfer.mapped_regions import map_copy_on_write
from quartet.weight_transfer.messages import MAX_DIMENSIONS
from quartet.weight_transfer.shared_memory import SharedRegion
from quartet.weight_transfer.tensors import TensorType

DTYPES: dict[TensorType, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""torch's name of each element type."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NEGATIVE_ZERO = {
    torch.float32: (torch.int32, -(2**31)),
    torch.bfloat16: (torch.int16, -(2**15)),
    torch.float16: (torch.int16, -(2**15)),
}
"""Bits of -0.0, as an integer of this type."""
EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
"""Parameters of a module of experts that a CPU kernel packs."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a tensor: offset, sizes and strides, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> Region:
        """Return the region of a view that starts ``offset`` elements into its tensor."""
        return cls(offset, tuple(tensor.shape), tensor.stride())

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of a tensor in row-major order."""
        return torch.as_strided(tensor.reshape(-1), self.size, self.stride, self.offset).contiguous()


@dataclass(frozen=True, slots=True)
class Holding:
    """Place of a part of a checkpoint tensor: ``source`` of the tensor is at ``region`` of parameter ``name`` of ``module``."""

    source: Region
    module: str
    name: str
    region: Region


@dataclass(slots=True)
class Loaded:
    """State of one checkpoint tensor in this process. ``negative_zeros``: where it is -0.0; None if nowhere, or not needed."""

    dtype: TensorType
    shape: tuple[int, ...]
    holdings: list[Holding] = field(default_factory=list)
    negative_zeros: torch.Tensor | None = None


@dataclass
class NoSettings(WeightTransferInitInfo):  # type: ignore[misc]
    """Arguments of vLLM's init_weight_transfer_engine: none."""


@dataclass
class SharedTensors(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Arguments of vLLM's update_weights, plain values.

    ``regions``: process, descriptor and size in bytes of each region of shared memory, see ``shared_memory.SharedRegion``.
    ``tensors``: element type, shape, index of the region and offset in bytes of each tensor, by its name in the checkpoint.
    """

    regions: list[list[int]]
    tensors: dict[str, list[Any]]


class SharedMemoryTransfer(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer from shared memory.

    A module must be loaded as a whole: vLLM allocates its parameters again.
    """

    init_info_cls = NoSettings
    update_info_cls = SharedTensors
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loaded: dict[str, Loaded] = {}
        """Every tensor that has been loaded, by its name in the checkpoint."""
        self._recorder: CopyRecorder | None = None

    def init_transfer_engine(self, init_info: NoSettings) -> None:
        """Do nothing: memory needs no connection."""

    def start_weight_update(self) -> None:
        """Prepare the model for the tensors of an update."""
        # vLLM warns about every module without new weights, and about those that have none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        initialize_layerwise_reload(self.model)
        self._recorder = CopyRecorder(self.model)

    def receive_weights(self, update_info: SharedTensors) -> None:
        """Load the tensors of an update, or some of them. Raises ValueError, InvalidRequest or ServiceUnavailable."""
        assert self._recorder is not None
        tensors = map_tensors(update_info.regions, update_info.tensors)
        self._recorder.add(tensors)
        with self._recorder:
            self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        """Load the modules that are not complete, and release the memory."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        with recorder:
            finalize_layerwise_reload(self.model, self.model_config)
        modules: dict[str, Any] = dict(self.model.named_modules())
        new = {
            name: Loaded(NAMES[tensor.dtype], tuple(tensor.shape), recorder.holdings[name])
            for name, tensor in recorder.tensors.items()
        }
        _pack_tied(modules, new)
        _pack_experts(modules, new)
        for name, state in new.items():
            if any(hasattr(modules[holding.module], "cpu_linear") for holding in state.holdings):
                state.negative_zeros = _negative_zeros(recorder.tensors[name])
        self.loaded |= new

    def shutdown(self) -> None:
        """Release the memory."""
        self._recorder = None


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which region of which parameter each region of the checkpoint's tensors is copied to."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Remember the model's parameters. During a reload they have no memory yet, and the loaders already copy to them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[str, torch.Tensor] = {}
        self.holdings: dict[str, list[Holding]] = {}
        self._starts: list[int] = []
        self._sources: list[tuple[int, str, torch.Tensor]] = []
        self._places: dict[int, tuple[str, str]] = {}
        self._kept: list[torch.Tensor] = []
        for module_name, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                self._places.setdefault(tensor.untyped_storage()._cdata, (module_name, name))
                self._kept.append(tensor)  # Otherwise another storage could get the same address.

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the copies of these tensors, too."""
        self.tensors |= tensors
        self.holdings |= {name: [] for name in tensors}
        sources = ((tensor.data_ptr(), name, tensor) for name, tensor in self.tensors.items() if tensor.numel())
        self._sources = sorted(sources, key=lambda source: source[:2])
        self._starts = [start for start, _, _ in self._sources]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        place = self._places.get(target.untyped_storage()._cdata)
        if place is None or source.is_meta or source.device.type != "cpu" or not source.numel():
            return
        index = bisect_right(self._starts, source.data_ptr()) - 1
        if index < 0:
            return
        _, name, tensor = self._sources[index]
        offset = (source.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        if offset >= tensor.numel() or source.dtype is not tensor.dtype or target.shape != source.shape:
            return
        holding = Holding(Region.of(source, offset), *place, Region.of(target, int(target.storage_offset())))
        if holding not in self.holdings[name]:
            self.holdings[name].append(holding)


def map_tensors(regions: Sequence[Sequence[int]], tensors: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors in regions of shared memory, see ``SharedTensors``. Changes do not reach the memory of others.

    Raises ValueError for places that are none, and the errors of ``map_copy_on_write``.
    """
    memory = [map_copy_on_write(SharedRegion(int(pid), int(fd), int(size))) for pid, fd, size in regions]
    result = {}
    for name, (kind, shape, region, offset) in tensors.items():
        dtype = DTYPES.get(kind)
        if dtype is None or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or not 0 <= region < len(memory):
            raise ValueError(f"{name}: {kind} {list(shape)} in region {region} of {len(memory)} is no tensor")
        size = torch.Size(shape).numel() * dtype.itemsize
        if not 0 <= offset <= len(memory[region]) - size or offset % dtype.itemsize:
            raise ValueError(
                f"{name}: {size} bytes at offset {offset} do not fit a region of {len(memory[region])} bytes"
            )
        result[name] = torch.from_numpy(memory[region][offset : offset + size]).view(dtype).view(shape)
    return result


def _negative_zeros(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is -0.0, or None if it is nowhere. A product with the identity matrix cannot tell -0.0 from 0.0."""
    integers, bits = _NEGATIVE_ZERO[tensor.dtype]
    mask = tensor.view(integers) == bits
    return mask if bool(mask.any()) else None


def packed_layout(module: Any) -> str:
    """Return the layout that a CPU kernel of vLLM keeps the weights of the module's experts in, or "" without such a kernel."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return "" if getattr(experts, "_use_zentorch", False) else str(getattr(experts, "isa", ""))


def _pack_experts(modules: Mapping[str, Any], loaded: Mapping[str, Loaded]) -> None:
    """Pack the weights of experts that have been loaded.

    On a CPU vLLM packs them when it creates their kernel, and not when new weights arrive: the kernel would read the rows of the
    checkpoint as packed ones.
    """
    for name in {holding.module for state in loaded.values() for holding in state.holdings}:
        if packed_layout(modules[name]):
            modules[name].quant_method.moe_kernel.fused_experts.process_weights_after_loading(modules[name])


def _pack_tied(modules: Mapping[str, Any], loaded: Mapping[str, Loaded]) -> None:
    """Pack parameters again that several modules share, and note every module that holds them.

    vLLM packs the weight of the module that it loads only. On a CPU a tied output layer would compute with its previous copy.
    """
    sharing: dict[tuple[int, str], list[tuple[str, Any]]] = {}
    for module_name, module in modules.items():
        for name, tensor in module.named_parameters(recurse=False):
            if tensor.numel():
                sharing.setdefault((tensor.data_ptr(), name), []).append((module_name, module))
    for state in loaded.values():
        for holding in list(state.holdings):
            tensor = getattr(modules[holding.module], holding.name)
            for other, module in sharing.get((tensor.data_ptr(), holding.name), []) if tensor.numel() else []:
                alias = Holding(holding.source, other, holding.name, holding.region)
                if alias not in state.holdings:
                    state.holdings.append(alias)
                if other != holding.module and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)
