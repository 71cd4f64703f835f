"""Weights of vLLM's processes: how they get there, and the digests of what the processes hold afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from quartet.engines.checkpoint_files import adapter_tensors, base_tensors, write_adapter
from quartet.engines.vllm_library import NAME
from quartet.engines.vllm_process import VLLMProcess
from quartet.errors import ServiceFailed
from quartet.weight_transfer.shared_memory import Allocator, Memory, SharedRegion, region_of
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor, WeightSet, tensor_digest


class VLLMWeights:
    """Policy versions in vLLM's processes: load, and read back.

    vLLM's processes map the memory that new weights are in. An adapter is a LoRA request with a file in
    ``folder``.
    """

    def __init__(self, process: VLLMProcess, model: str, folder: Path) -> None:
        self._process, self._model, self._folder = process, model, folder
        self._modules: dict[str, list[str]] = {}
        # Of the last load: the regions of each tensor, their digests, and the adapter.
        self._verified: tuple[dict[str, list[Any]], dict[str, bytes], AdapterSettings | None] | None = None
        self.lora: Any = None
        """LoRA request of the loaded adapter; None without one."""

    def load(self, weights: WeightSet, changed: Collection[str]) -> dict[str, bytes]:
        """Load a policy version and return the digests of what vLLM holds afterwards. Raises ServiceFailed.

        ``changed`` names the tensors that differ from the loaded version.
        """
        before, self._verified = self._verified, None
        base = base_tensors(weights)
        loaded = self._closure(set(changed) & base.keys())
        if loaded:
            self._load({name: base[name] for name in base if name in loaded})
        if before is not None and weights.adapter is not None and not loaded:
            # The base stays as it is. It is read back after each generation.
            held, digests = before[0], dict(before[1])
        else:
            held = self._held(base)
            digests = {name: combined_regions(name, base[name], entries) for name, entries in held.items()}
        self._verified = held, dict(digests), weights.adapter
        if weights.adapter is not None:
            digests |= self._load_adapter(weights, weights.adapter)
        return digests

    def read_back(self) -> dict[str, bytes]:
        """Return the digests of what vLLM holds of the loaded weights; none without weights.

        The regions are compared with those of the load, because the weights that were sent may be gone.
        """
        if self._verified is None:
            return {}
        held, digests, adapter = self._verified
        now = self._held(digests)
        result = {
            name: digest if now[name] == held[name] else xxhash.xxh3_128_digest(json.dumps(now[name]).encode())
            for name, digest in digests.items()
        }
        return result | (self.read_back_adapter(adapter) if adapter is not None else {})

    def _load(self, tensors: Mapping[str, HostTensor]) -> None:
        """Let vLLM's processes load tensors from the memory that they are in. Raises ServiceFailed."""
        # The memory of these copies is there until the end of this method.
        copies = shared_copies({name: tensor for name, tensor in tensors.items() if region_of(tensor.data) is None})
        regions: dict[SharedRegion, int] = {}
        places: dict[str, list[Any]] = {}
        for name, tensor in tensors.items():
            place = region_of(copies[name].data if name in copies else tensor.data)
            assert place is not None
            index = regions.setdefault(place[0], len(regions))
            places[name] = [tensor.dtype, list(tensor.shape), index, place[1]]
        self._process.update_weights([[region.pid, region.fd, region.num_bytes] for region in regions], places)
        # Every rank has the same modules.
        self._modules = json.loads(self._process.rpc("quartet_modules")[0])

    def _closure(self, changed: set[str]) -> set[str]:
        """Return the tensors to load so that every module with a changed tensor is loaded as a whole.

        vLLM fuses q, k and v into one parameter, and gate and up into another. It allocates a module's parameters again when it
        loads one of its tensors.
        """
        if not changed <= self._modules.keys():
            return changed | self._modules.keys()
        touched = {module for name in changed for module in self._modules[name]}
        return {name for name, modules in self._modules.items() if touched.intersection(modules)}

    def _held(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return the regions of each tensor that the ranks hold: offset, size, stride and digest.

        A region that is a part of a tensor is compared with the same part of the tensor that was sent. Equal regions that cover
        the tensor prove its content.
        """
        ranks = [json.loads(reply) for reply in self._process.rpc("quartet_digests")]
        return {name: [entry for rank in ranks for entry in rank.get(name, ())] for name in names}

    def _load_adapter(self, weights: WeightSet, adapter: AdapterSettings) -> dict[str, bytes]:
        """Load the adapter in the place of the one before, and return the digests of its matrices.

        Its id stays the same, so that running requests, which name it, continue with the new matrices.
        """
        folder = self._folder / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        write_adapter(folder, self._model, adapter, adapter_tensors(weights))
        from vllm.lora.request import LoRARequest

        # vLLM loads each adapter once by its id, unless a request says otherwise. Those of generations do not.
        self.lora = LoRARequest("policy", 1, str(folder))
        replacing = LoRARequest("policy", 1, str(folder), load_inplace=True)
        if not self._process.call(self._process.llm.add_lora(replacing), "add_lora"):
            raise ServiceFailed(f"{NAME}: did not load the adapter of policy version {weights.version}")
        return self.read_back_adapter(adapter)

    def read_back_adapter(self, adapter: AdapterSettings) -> dict[str, bytes]:
        """Return the digest of each matrix of the active adapter."""
        path = self._folder / "adapter" / "adapter_model.safetensors"
        scaling = adapter.alpha / adapter.rank
        replies = self._process.rpc("quartet_adapter_digests", str(path), self.lora.lora_int_id, scaling)
        ranks = [json.loads(reply) for reply in replies]
        return {name: agreed_digest([bytes.fromhex(rank[name]) for rank in ranks]) for name in ranks[0]}


def shared_copies(tensors: Mapping[str, HostTensor]) -> dict[str, Memory]:
    """Copy tensors to memory that other processes can map. Raises ServiceFailed if this machine has none, OutOfMemory."""
    memories = Allocator().allocate([tensor.data.nbytes for tensor in tensors.values()])
    for tensor, memory in zip(tensors.values(), memories, strict=True):
        if memory.region is None:
            raise ServiceFailed(
                f"{NAME}: this machine or container has no memory that {NAME}'s processes can map, and the log above says why; "
                "allow memfd_create"
            )
        memory.data[:] = tensor.data
    return dict(zip(tensors, memories, strict=True))


def combined_regions(name: str, tensor: HostTensor, entries: Sequence[Any]) -> bytes:
    """Return the tensor's digest if all regions hold its content; otherwise another one. Raises ServiceFailed."""
    if not entries:
        raise ServiceFailed(f"{NAME}: holds no copy of the weight {name} that can be read back; use another engine")
    whole, partial, differs = [], [], False
    covered = None
    for offset, size, stride, text in entries:
        digest = bytes.fromhex(text)
        if _is_whole(tensor, offset, size, stride):
            whole.append(digest)
            continue
        if covered is None:
            covered = np.zeros(int(np.prod(tensor.shape)), bool)
        _region(covered, offset, size, stride)[...] = True
        expected = xxhash.xxh3_128_digest(np.ascontiguousarray(_region(_elements(tensor), offset, size, stride)).data)
        differs |= digest != expected
        partial.append(digest)
    if partial and not whole and covered is not None and not covered.all():
        raise ServiceFailed(f"{NAME}: only a part of the weight {name} can be read back; use another engine")
    if differs:
        return xxhash.xxh3_128_digest(b"".join(partial))
    return agreed_digest([*whole, *([tensor_digest(tensor)] if partial else [])])


def agreed_digest(digests: Sequence[bytes]) -> bytes:
    """Return the digest that all copies have. If they differ, return one that no copy has."""
    return digests[0] if len(set(digests)) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def _is_whole(tensor: HostTensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> bool:
    row_major = _row_major(size)
    return (
        offset == 0
        and tuple(size) == tensor.shape
        and all(n == 1 or s == r for n, s, r in zip(size, stride, row_major, strict=True))
    )


def _row_major(size: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]


def _elements(tensor: HostTensor) -> NDArray[Any]:
    return tensor.data.reshape(-1).view(np.uint32 if ITEM_BYTES[tensor.dtype] == 4 else np.uint16)


def _region(elements: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int]) -> NDArray[Any]:
    """Return a view of a region of a tensor's elements. Offset and strides are in elements. Raises ServiceFailed."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if offset < 0 or min(stride, default=0) < 0 or last >= elements.size:
        raise ServiceFailed(f"{NAME}: reported a region outside its weight")
    item = elements.itemsize
    return np.lib.stride_tricks.as_strided(elements[offset:], tuple(size), tuple(s * item for s in stride))
