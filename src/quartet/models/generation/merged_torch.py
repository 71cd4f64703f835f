"""Torch engine that decodes with a LoRA adapter merged into copies of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Trajectory
from quartet.engines.engine import TokenDecoder, TurnSource
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.lora import Adapter
from quartet.models.weights.merged_weights import MergedWeights


class MergedTorchEngine(TorchEngine):
    """Engine that shares a policy's model except for the matrices of its adapted layers. See ``TorchEngine``.

    Each adapted layer is one matmul instead of three. In half precision, merged weights are rounded, so the engine samples from a
    slightly different distribution than the one that is trained.
    """

    def __init__(
        self,
        adapter: Adapter,
        stop_ids: frozenset[int],
        max_concurrent_sequences: int,
        decode: TokenDecoder | None = None,
    ) -> None:
        """``adapter`` on the policy's model. Raises ModelError if parameters of experts have adapters."""
        self._merged = MergedWeights(adapter)
        self._is_current = True
        super().__init__(self._merged.model, stop_ids, max_concurrent_sequences, decode=decode)

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool],
        turns: TurnSource | None = None,
    ) -> Iterator[Trajectory]:
        if not self._is_current:
            self._merged.update()
            self._is_current = True
        return super()._generate(requests, sampling, seed, policy_version, cancelled, turns)

    def release(self, everything: bool = False) -> None:
        """Free a large cache, and with ``everything`` also the merged weights."""
        super().release(everything)
        if everything:
            self._merged.release()
            self._is_current = False

    def weights_changed(self) -> None:
        """Merge the adapter again before the next generation."""
        self._is_current = False


def shared_torch_engine(
    model: Any,
    adapter: Adapter | None,
    stop_ids: frozenset[int],
    max_concurrent_sequences: int,
    merge_adapter: bool,
    decode: TokenDecoder | None = None,
) -> TorchEngine:
    """Return the engine that decodes with ``model`` itself, or with its ``adapter`` merged. See ``TorchEngine``."""
    if adapter is not None and merge_adapter:
        return MergedTorchEngine(adapter, stop_ids, max_concurrent_sequences, decode)
    return TorchEngine(model, stop_ids, max_concurrent_sequences, decode=decode)
