"""vLLM with switches that break it, and methods in its workers that change its memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.engines.engine import ServedModel
from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.engines.vllm_weights import VLLMWeights
from quartet.errors import ServiceFailed
from quartet.weight_transfer.tensors import HostTensor
from tests.detached_engines.tiny_checkpoint import served_model


class PartialWeights(VLLMWeights):
    """Weights that arrive in part, or whose loading fails afterwards, when a test switches that on."""

    load_fraction = 1.0
    load_error = ""

    def _load(self, tensors: Mapping[str, HostTensor]) -> None:
        kept = dict(list(tensors.items())[: round(len(tensors) * self.load_fraction)])
        if kept:
            super()._load(kept)
        if self.load_error:
            raise ServiceFailed(self.load_error)


class BreakableVLLM(VLLMEngine):
    """The engine with faults that a test switches on. All are off at first."""

    worker_extension = "tests.detached_engines.vllm_worker.ChangingWorker"

    def __init__(self, settings: VLLMSettings, served: ServedModel) -> None:
        super().__init__(settings, served)
        self.keep_prefix_cache = False
        self.without_salt = False
        self.weights = self._weights = PartialWeights(self._process, served.model, self._folder)

    def flip(self, module: str, name: str) -> None:
        """Flip a bit of a parameter in every worker."""
        self._process.rpc("quartet_flip", module, name)

    def flip_adapter(self, module: str) -> None:
        """Change an element of the active adapter in every worker."""
        self._process.rpc("quartet_flip_adapter", module)

    def adapter_digests(self) -> dict[str, bytes]:
        """Read the active adapter back."""
        assert self._adapter is not None
        return self._weights.read_back_adapter(self._adapter)

    def core_process(self) -> Any:
        """Return the process of vLLM's engine core."""
        return self._process.llm.engine_core.resources.engine_manager.processes[0]

    def _reset_prefix_cache(self) -> None:
        if not self.keep_prefix_cache:
            super()._reset_prefix_cache()

    def _cache_salt(self) -> str | None:
        return None if self.without_salt else super()._cache_salt()


def vllm_engine(
    folder: Path, tensor_parallel_size: int = 1, speculative: Mapping[str, Any] | None = None, **served: Any
) -> BreakableVLLM:
    """Start an engine for the model in ``folder``, with a small cache on the CPU."""
    settings = VLLMSettings(
        max_concurrent_sequences=16,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=True,
        engine_arguments={"block_size": 32, "kv_cache_memory_bytes": 64 << 20},
        speculative=speculative or {},
    )
    return BreakableVLLM(settings, served_model(folder, **served))
