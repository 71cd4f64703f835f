"""Torch engine with its own copy of the weights, for a generator process or for generation during updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quartet.contract.generation import EngineProperties, GenerationRequest, SamplingParameters
from quartet.engines.engine import Cancelled, EngineResponse, TokenDecoder, TurnSource
from quartet.errors import MismatchError
from quartet.models.generation.merged_torch import shared_torch_engine
from quartet.models.weights.host_tensors import host_tensor, named_weights, write_tensor
from quartet.models.weights.lora import Adapter
from quartet.weight_transfer.digests import tensor_digest
from quartet.weight_transfer.tensors import WeightSet


class DetachedTorchEngine:
    """Engine that decodes with a separate model, whose weights come by ``load_weights``. See ``quartet.engines.engine``."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter | None,
        stop_ids: frozenset[int],
        max_concurrent_sequences: int,
        merge_adapter: bool = False,
        decode: TokenDecoder | None = None,
    ) -> None:
        """Own ``model`` from now on, with its ``adapter`` if it has one. For the other parameters see ``shared_torch_engine``."""
        model.requires_grad_(False)
        self._engine = shared_torch_engine(model, adapter, stop_ids, max_concurrent_sequences, merge_adapter, decode)
        self._weights = named_weights(model, adapter)

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine."""
        return replace(self._engine.properties, weights="tensors", digest="read back")

    @torch.no_grad()
    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Copy the changed tensors into the model. Return the digest of each of the model's weights.

        Raises MismatchError if the weights are those of another architecture.
        """
        different = weights.tensors.keys() ^ self._weights.keys()
        if different:
            raise MismatchError(
                f"weights: {len(different)} names differ from those of this engine's model, the first {min(different)!r}; "
                "start actor and generator with the same actor.model and actor.lora"
            )
        for name in changed:
            try:
                write_tensor(self._weights[name], weights.tensors[name])
            except ValueError as error:
                raise MismatchError(
                    f"weights: {name}: {error}; start actor and generator with the same model"
                ) from None
        self._engine.weights_changed()
        return self.held_digests(self._weights)

    @torch.no_grad()
    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return the digest of these tensors as the model holds them."""
        return {name: tensor_digest(host_tensor(self._weights[name])) for name in names}

    @torch.no_grad()
    def copy_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, bytes]:
        """Copy every weight into the model, one after the other. Return the digest of each as the model holds it.

        Raises MismatchError if the weights are those of another architecture. All of ``tensors`` are consumed in any case.
        """
        digests, unknown = {}, list[str]()
        for name, value in tensors:
            target = self._weights.get(name)
            if target is None or (target.dtype, target.shape) != (value.dtype, value.shape):
                unknown.append(name)
                continue
            target.copy_(value)
            digests[name] = tensor_digest(host_tensor(target))
        different = [*unknown, *(self._weights.keys() - digests.keys())]
        if different:
            raise MismatchError(
                f"weights: {len(different)} differ from those of this engine's model, the first {min(different)!r}; restart the "
                "actor"
            )
        self._engine.weights_changed()
        return digests

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Cancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished. For errors see ``TorchEngine.generate``."""
        by_id = {request.id: request for request in requests}
        trajectories = self._engine.generate(requests, sampling, seed, 0, cancelled)
        return (EngineResponse(by_id[item.id], item.response_ids, item.log_probs) for item in trajectories)

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Cancelled,
        turns: TurnSource,
    ) -> Iterator[EngineResponse]:
        """Generate the turns of episodes. See ``TorchEngine.generate_turns``."""
        responses = self._engine.generate_turns(requests, sampling, seed, 0, cancelled, turns)
        return (EngineResponse(turns.request_of(item.id), item.response_ids, item.log_probs) for item in responses)

    def sleep(self) -> None:
        """Do nothing: the memory of a generation is freed with it."""

    def close(self) -> None:
        """Release the cache and the captured graphs."""
        self._engine.close()
