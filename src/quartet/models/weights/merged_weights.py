"""A view of a model with an adapter, in which each adapted layer has one matrix: the base weights plus the adapter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quartet.models.weights.lora import Adapter


class MergedWeights:
    """A model without adapter that computes what ``adapter.model`` does, up to rounding.

    Only the matrices of adapted layers are copies, in the precision of the model. All other weights are those of the adapted
    model itself. The base weights stay as they are, so nothing has to be restored.
    """

    def __init__(self, adapter: Adapter) -> None:
        """Raises ModelError if parameters of experts have adapters."""
        self._layers: list[tuple[Any, nn.Parameter]] = []
        # A deep copy in which weights, and the layers that replace adapted ones, count as copied.
        copies: dict[int, object] = {
            id(tensor): tensor for tensor in (*adapter.model.parameters(), *adapter.model.buffers())
        }
        for layer in adapter.linear_layers():
            plain = copy.deepcopy(layer.get_base_layer(), copies)
            plain.weight = nn.Parameter(torch.empty_like(plain.weight), requires_grad=False)
            copies[id(layer)] = plain
            self._layers.append((layer, plain.weight))
        self.model: Any = copy.deepcopy(adapter.model, copies)
        self._adapter = adapter
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Compute the matrices again from the base weights and the adapter. They stay at their addresses, unless released."""
        for layer, merged in self._layers:
            result = self._adapter.merged_weight(layer)
            if merged.shape == result.shape:
                merged.copy_(result)
            else:
                merged.data = result

    def release(self) -> None:
        """Free the matrices until the next ``update``."""
        for _, merged in self._layers:
            merged.data = merged.new_empty(0)
