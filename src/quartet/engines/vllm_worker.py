"""Part of Quartet that runs in vLLM's worker processes: it reads weights back. Needs torch and vLLM.

Only vLLM imports this module, by the name in ``worker_extension_cls``. Arguments and results are plain strings: vLLM sends them
without pickle. ``vllm_transfer`` loads weights.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from quartet.engines.vllm_library import BACKEND
from quartet.engines.vllm_transfer import (
    DTYPES,
    EXPERT_WEIGHTS,
    NAMES,
    Loaded,
    Region,
    SharedMemoryTransfer,
    packed_layout,
)
from quartet.weight_transfer.tensors import HostTensor, tensor_digest

WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)

_PROBE_ROWS = 1024
"""Rows of the identity matrix that are multiplied at a time to read a packed weight."""


class WeightsExtension:
    """Methods that vLLM adds to its worker class. The names start with ``quartet_``, so that they hide no method of vLLM."""

    model_runner: Any
    weight_transfer_engine: SharedMemoryTransfer

    def quartet_modules(self) -> str:
        """Return the modules of each tensor that has been loaded as JSON."""
        return json.dumps(
            {
                name: sorted({holding.module for holding in state.holdings})
                for name, state in self.weight_transfer_engine.loaded.items()
            }
        )

    def quartet_digests(self) -> str:
        """Read every loaded tensor back from the model's parameters. Return the digest of each region as JSON.

        For each tensor a list of [offset, sizes, strides, digest]. The digest of a region that is the whole tensor is that of the
        tensor, see ``digests.tensor_digest``; otherwise it is the xxh3-128 of the region's bytes in row-major order.
        """
        model = self.model_runner.get_model()
        modules = dict(model.named_modules())
        cache: dict[tuple[str, str], torch.Tensor] = {}
        loaded = self.weight_transfer_engine.loaded
        result: dict[str, list[Any]] = {name: [] for name in loaded}
        places = [(holding, name, state) for name, state in loaded.items() for holding in state.holdings]
        # The tensors of one module follow each other, so one parameter at a time is enough.
        for holding, name, state in sorted(places, key=lambda place: (place[0].module, place[0].name)):
            key = (holding.module, holding.name)
            if key not in cache:
                cache = {key: _read_back(modules[holding.module], holding.name)}
            held = holding.region.select(cache[key]).to(DTYPES[state.dtype]).cpu()
            if state.negative_zeros is not None:
                mask = holding.source.select(state.negative_zeros).reshape(held.shape)
                held = torch.where(mask & (held == 0), torch.tensor(-0.0, dtype=held.dtype), held)
            source = holding.source
            result[name].append([source.offset, source.size, source.stride, _digest(held, source, state).hex()])
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
                dtype = NAMES[tensor.dtype]
                result[name] = tensor_digest(HostTensor(dtype, tuple(tensor.shape), _bytes(tensor).numpy())).hex()
            else:
                result[name] = xxhash.xxh3_128_hexdigest(_bytes(held.contiguous()).numpy().data)
        return json.dumps(result)


def _read_back(module: Any, name: str) -> torch.Tensor:
    """Return a parameter as the module computes with it.

    On a CPU vLLM keeps the weight of a linear layer only inside a packed kernel. The product with the identity matrix is the
    weight, exactly: each sum has one term that is not zero. The weights of experts are there in another order.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tensor: torch.Tensor = getattr(module, name).detach()
    if (layout := packed_layout(module)) and name in EXPERT_WEIGHTS:
        return _unpacked(tensor, layout)
    linear = getattr(module, "cpu_linear", None)
    looks_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    if linear is None or name != "weight" or looks_up:
        return tensor.contiguous()
    if linear is torch.nn.functional.linear:
        return tensor.contiguous()
    # A layer that every rank holds whole, such as a router, has no partition; the head of the vocabulary has neither.
    sizes = (getattr(module, name, None) for name in ("input_size_per_partition", "input_size"))
    columns = int(next((size for size in sizes if size is not None), tensor.shape[-1]))
    blocks = []
    with torch.inference_mode():
        for start in range(0, columns, _PROBE_ROWS):
            rows = min(_PROBE_ROWS, columns - start)
            probe = torch.zeros(rows, columns, dtype=tensor.dtype)
            probe[torch.arange(rows), start + torch.arange(rows)] = 1
            blocks.append(linear(probe, tensor, None))
    return torch.cat(blocks).t().contiguous()


def _unpacked(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return packed weights of experts [experts, outputs, inputs] in the order of the checkpoint.

    Packing numbers shows where each weight goes. They are packed digit by digit, because bfloat16 has all numbers up to 256 only.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_prepack_moe_weight

    numbers = torch.arange(tensor[0].numel())
    origins = torch.zeros_like(numbers)
    for digit in range(4):
        values = (numbers // 256**digit % 256).to(tensor.dtype).view(1, *tensor.shape[1:])
        origins += cpu_prepack_moe_weight(values, layout).flatten().long() * 256**digit
    result = torch.empty_like(tensor)
    result.flatten(1)[:, origins] = tensor.flatten(1)
    return result


def _digest(held: torch.Tensor, source: Region, state: Loaded) -> bytes:
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
            dtype=DTYPES[entry["dtype"]],
            count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // DTYPES[entry["dtype"]].itemsize,
            offset=8 + length + entry["data_offsets"][0],
        ).view(entry["shape"])
        for name, entry in header.items()
    }
