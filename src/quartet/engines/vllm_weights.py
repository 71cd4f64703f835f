"""Weights of vLLM's processes: how they get there, and the digests of what the processes hold afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quartet.engines.checkpoint_files import adapter_tensors, base_tensors, write_adapter, write_safetensors
from quartet.engines.vllm_library import NAME
from quartet.engines.vllm_process import VLLMProcess
from quartet.engines.vllm_regions import agreed_digest, combined_regions
from quartet.errors import ServiceFailed
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor, WeightSet


class VLLMWeights:
    """Policy versions in vLLM's processes: load, and read back. ``folder`` is for the files that vLLM reads.

    New weights are a file in memory that vLLM's own loaders read. An adapter is one LoRA request per policy version.
    """

    def __init__(self, process: VLLMProcess, model: str, folder: Path) -> None:
        self._process, self._model, self._folder = process, model, folder
        self._modules: dict[str, list[str]] = {}
        self._lora_count = 0
        self.lora: Any = None
        """LoRA request of the loaded adapter; None without one."""

    def load(self, weights: WeightSet, changed: Collection[str]) -> dict[str, bytes]:
        """Load a policy version and return the digests of what vLLM holds afterwards. Raises ServiceFailed.

        ``changed`` names the tensors that differ from the loaded version.
        """
        base = base_tensors(weights)
        loaded = self._closure(set(changed) & base.keys())
        if loaded:
            self._load({name: base[name] for name in base if name in loaded})
        digests = self._read_back(base)
        if weights.adapter is not None:
            digests |= self._load_adapter(weights, weights.adapter)
        return digests

    def read_back(self, weights: WeightSet) -> dict[str, bytes]:
        """Return the digests of what vLLM holds of the loaded ``weights``."""
        digests = self._read_back(base_tensors(weights))
        return digests | (self.read_back_adapter(weights.adapter) if weights.adapter is not None else {})

    def _load(self, tensors: Mapping[str, HostTensor]) -> None:
        path = self._folder / "weights.safetensors"
        try:
            write_safetensors(path, tensors)
            # Every rank has the same modules.
            self._modules = json.loads(self._process.rpc("quartet_load", str(path))[0])
        finally:
            path.unlink(missing_ok=True)

    def _closure(self, changed: set[str]) -> set[str]:
        """Return the tensors to load so that every module with a changed tensor is loaded as a whole.

        vLLM fuses q, k and v into one parameter, and gate and up into another. It allocates a module's parameters again when it
        loads one of its tensors.
        """
        if not changed <= self._modules.keys():
            return changed | self._modules.keys()
        touched = {module for name in changed for module in self._modules[name]}
        return {name for name, modules in self._modules.items() if touched.intersection(modules)}

    def _read_back(self, tensors: Mapping[str, HostTensor]) -> dict[str, bytes]:
        """Return the digest of each tensor from the regions that the ranks hold.

        A region that is a part of a tensor is compared with the same part of the tensor that was sent. Equal regions that cover
        the tensor prove its content.
        """
        ranks = [json.loads(reply) for reply in self._process.rpc("quartet_digests")]
        digests = {}
        for name, tensor in tensors.items():
            entries = [entry for rank in ranks for entry in rank.get(name, ())]
            digests[name] = combined_regions(name, tensor, entries)
        return digests

    def _load_adapter(self, weights: WeightSet, adapter: AdapterSettings) -> dict[str, bytes]:
        """Load the adapter under a new id, and return the digests of its matrices."""
        folder = self._folder / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        write_adapter(folder, self._model, adapter, adapter_tensors(weights))
        from vllm.lora.request import LoRARequest

        llm, call = self._process.llm, self._process.call
        if self.lora is not None:
            call(llm.remove_lora(self.lora.lora_int_id), "remove_lora")
        self._lora_count += 1
        # A new id for each version: vLLM keeps an adapter by its id.
        self.lora = LoRARequest(f"policy-{self._lora_count}", self._lora_count, str(folder))
        if not call(llm.add_lora(self.lora), "add_lora"):
            raise ServiceFailed(f"{NAME}: did not load the adapter of policy version {weights.version}")
        return self.read_back_adapter(adapter)

    def read_back_adapter(self, adapter: AdapterSettings) -> dict[str, bytes]:
        """Return the digest of each matrix of the active adapter."""
        path = self._folder / "adapter" / "adapter_model.safetensors"
        scaling = adapter.alpha / adapter.rank
        replies = self._process.rpc("quartet_adapter_digests", str(path), self.lora.lora_int_id, scaling)
        ranks = [json.loads(reply) for reply in replies]
        return {name: agreed_digest([bytes.fromhex(rank[name]) for rank in ranks]) for name in ranks[0]}
