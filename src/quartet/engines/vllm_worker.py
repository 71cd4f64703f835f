"""Part of Quartet that runs in vLLM's worker processes: it loads weights and reads them back. Needs torch and vLLM.

Only vLLM imports this module, by the name in ``worker_extension_cls``. Arguments and results are plain strings: vLLM sends them
without pickle.
"""

from __future__ import annotations

import json
import logging
import mmap
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.weight_transfer.tensors import HostTensor, TensorType, tensor_digest

_DTYPES: dict[TensorType, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PROBE_ROWS = 1024
"""Rows of the identity matrix that are multiplied at a time to read a packed weight."""


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
class _Loaded:
    """State of one checkpoint tensor in this worker."""

    dtype: TensorType
    shape: tuple[int, ...]
    holdings: list[Holding] = field(default_factory=list)
    negative_zeros: torch.Tensor | None = None


class WeightsExtension:
    """Methods that vLLM adds to its worker class. The names start with ``quartet_``, so that they hide no method of vLLM."""

    model_runner: Any
    vllm_config: Any

    def quartet_load(self, path: str) -> str:
        """Load the tensors of a safetensors file through vLLM's own loaders. Return the modules of each tensor as JSON.

        A module must be loaded as a whole: vLLM allocates its parameters again.
        """
        tensors = _read(Path(path))
        model = self.model_runner.get_model()
        recorder = _CopyRecorder(tensors)

        def iterate() -> Iterator[tuple[str, torch.Tensor]]:
            # vLLM asks for the first tensor when its parameters are ready to be loaded.
            recorder.watch(model)
            yield from tensors.items()

        # vLLM warns about every module without new weights, and about those that have none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        with recorder:
            self.reload_weights(weights_iterator=iterate())  # type: ignore[attr-defined]
        loaded = self._quartet_loaded()
        for name, tensor in tensors.items():
            dtype = next(key for key, value in _DTYPES.items() if value is tensor.dtype)
            loaded[name] = _Loaded(dtype, tuple(tensor.shape), recorder.holdings[name], _negative_zeros(tensor))
        _pack_tied(model, loaded)
        return json.dumps({name: sorted({h.module for h in state.holdings}) for name, state in loaded.items()})

    def quartet_digests(self) -> str:
        """Read every loaded tensor back from the model's parameters. Return the digest of each region as JSON.

        For each tensor a list of [offset, sizes, strides, digest]. The digest of a region that is the whole tensor is that of the
        tensor, see ``digests.tensor_digest``; otherwise it is the xxh3-128 of the region's bytes in row-major order.
        """
        model = self.model_runner.get_model()
        modules = dict(model.named_modules())
        cache: dict[tuple[str, str], torch.Tensor] = {}
        result: dict[str, list[Any]] = {}
        for name, state in self._quartet_loaded().items():
            entries = []
            for holding in state.holdings:
                key = (holding.module, holding.name)
                if key not in cache:
                    # The tensors of one module follow each other, so one parameter at a time is enough.
                    cache = {key: _read_back(modules[holding.module], holding.name)}
                held = holding.region.select(cache[key]).to(_DTYPES[state.dtype]).cpu()
                if state.negative_zeros is not None:
                    mask = holding.source.select(state.negative_zeros).reshape(held.shape)
                    held = torch.where(mask & (held == 0), torch.tensor(-0.0, dtype=held.dtype), held)
                source = holding.source
                entries.append([source.offset, source.size, source.stride, _digest(held, source, state).hex()])
            result[name] = entries
        return json.dumps(result)

    def quartet_adapter_digests(self, path: str, adapter_id: int, scaling: float) -> str:
        """Compare the matrices of an active LoRA adapter with those of its file. Return the digest of each tensor as JSON.

        vLLM multiplies B by the scaling and converts both to its own type. A matrix that is exactly this has the digest of the
        tensor in the file. Any other has a digest of the bytes that vLLM holds.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id)
        packed = {
            part: (name, index) for name, parts in manager.packed_modules.items() for index, part in enumerate(parts)
        }
        result = {}
        for name, tensor in _read(Path(path)).items():
            module_name, matrix, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
            owner, index = packed.get(module_name, (module_name, 0))
            wrapper = manager.modules[owner]
            stacked = (wrapper.lora_a_stacked if matrix == "lora_A" else wrapper.lora_b_stacked)[index]
            expected = tensor.to(stacked.dtype)
            if matrix == "lora_B" and scaling != 1:
                expected = expected * scaling
            if wrapper.tp_size > 1:
                expected = _shard(wrapper, matrix, index, expected)
            held = stacked[slot, 0].cpu()
            rows, columns = expected.shape
            part = held[:rows, :columns].contiguous()
            rest = int(held.count_nonzero()) - int(part.count_nonzero())
            if rest == 0 and torch.equal(_bytes(part), _bytes(expected.contiguous())):
                dtype = next(key for key, value in _DTYPES.items() if value is tensor.dtype)
                result[name] = tensor_digest(HostTensor(dtype, tuple(tensor.shape), _bytes(tensor).numpy())).hex()
            else:
                result[name] = xxhash.xxh3_128_hexdigest(_bytes(held.contiguous()).numpy().data)
        return json.dumps(result)

    def _quartet_loaded(self) -> dict[str, _Loaded]:
        if not hasattr(self, "_quartet_state"):
            self._quartet_state: dict[str, _Loaded] = {}
        return self._quartet_state


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which region of which parameter each region of the checkpoint's tensors is copied to."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holdings: dict[str, list[Holding]] = {name: [] for name in tensors}
        sources = sorted((tensor.data_ptr(), name, tensor) for name, tensor in tensors.items() if tensor.numel())
        self._starts = [start for start, _, _ in sources]
        self._sources = [(name, tensor) for _, name, tensor in sources]
        self._places: dict[int, tuple[str, str]] = {}
        self._kept: list[torch.Tensor] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Remember the model's parameters. During a reload they have no memory yet, and the loaders already copy to them."""
        for module_name, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                self._places.setdefault(tensor.untyped_storage()._cdata, (module_name, name))
                self._kept.append(tensor)  # Otherwise another storage could get the same address.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._places:
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        place = self._places.get(target.untyped_storage()._cdata)
        if place is None or source.is_meta or source.device.type != "cpu" or not source.numel():
            return
        index = bisect_right(self._starts, source.data_ptr()) - 1
        if index < 0:
            return
        name, tensor = self._sources[index]
        offset = (source.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        if offset >= tensor.numel() or source.dtype is not tensor.dtype or target.shape != source.shape:
            return
        holding = Holding(Region.of(source, offset), *place, Region.of(target, int(target.storage_offset())))
        if holding not in self.holdings[name]:
            self.holdings[name].append(holding)


def _pack_tied(model: torch.nn.Module, loaded: dict[str, _Loaded]) -> None:
    """Pack parameters again that several modules share, and note every module that holds them.

    vLLM packs the weight of the module that it loads only. On a CPU a tied output layer would compute with its previous copy.
    """
    sharing: dict[tuple[int, str], list[tuple[str, Any]]] = {}
    modules: dict[str, Any] = dict(model.named_modules())
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


def _read_back(module: Any, name: str) -> torch.Tensor:
    """Return a parameter as the module computes with it.

    On a CPU vLLM keeps the weight of a linear layer only inside a packed kernel. The product with the identity matrix is the
    weight, exactly: each sum has one term that is not zero.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tensor: torch.Tensor = getattr(module, name).detach()
    linear = getattr(module, "cpu_linear", None)
    looks_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    if linear is None or name != "weight" or looks_up:
        return tensor.contiguous()
    if linear is torch.nn.functional.linear:
        return tensor.contiguous()
    columns = int(module.input_size_per_partition if hasattr(module, "input_size_per_partition") else tensor.shape[1])
    blocks = []
    with torch.inference_mode():
        for start in range(0, columns, _PROBE_ROWS):
            rows = min(_PROBE_ROWS, columns - start)
            probe = torch.zeros(rows, columns, dtype=tensor.dtype)
            probe[torch.arange(rows), start + torch.arange(rows)] = 1
            blocks.append(linear(probe, tensor, None))
    return torch.cat(blocks).t().contiguous()


def _negative_zeros(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is -0.0, or None if it is nowhere. A product with the identity matrix cannot tell -0.0 from 0.0."""
    mask = torch.signbit(tensor) & (tensor == 0)
    return mask if bool(mask.any()) else None


def _digest(held: torch.Tensor, source: Region, state: _Loaded) -> bytes:
    data = _bytes(held).numpy()
    if source.size == state.shape and source.offset == 0 and _is_row_major(source):
        return tensor_digest(HostTensor(state.dtype, state.shape, data))
    return xxhash.xxh3_128_digest(data.data)


def _is_row_major(region: Region) -> bool:
    expected = 1
    for size, stride in zip(reversed(region.size), reversed(region.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _shard(wrapper: Any, matrix: str, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an adapter's matrix that this rank holds, by vLLM's own rule."""
    cut = wrapper.slice_lora_a if matrix == "lora_A" else wrapper.slice_lora_b
    if wrapper.n_slices == 1:
        return cut(tensor)  # type: ignore[no-any-return]
    parts: list[torch.Tensor | None] = [None] * wrapper.n_slices
    parts[index] = tensor
    return cut(parts)[index]  # type: ignore[no-any-return]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of its pages. Changes do not reach the file."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack("<Q", pages[:8])
    header = json.loads(pages[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: torch.frombuffer(
            pages,
            dtype=_DTYPES[entry["dtype"]],
            count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // _DTYPES[entry["dtype"]].itemsize,
            offset=8 + length + entry["data_offsets"][0],
        ).view(entry["shape"])
        for name, entry in header.items()
    }
