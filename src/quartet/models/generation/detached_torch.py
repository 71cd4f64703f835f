"""Torch engine with its own copy of the weights: it generates during an update of the policy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from quartet.models.generation.torch_engine import TorchEngine


class DetachedTorchEngine(TorchEngine):
    """Engine that decodes with a copy of the policy, made at the last ``weights_changed``."""

    def __init__(self, learner: Any, stop_ids: frozenset[int], max_concurrent_sequences: int, device: str) -> None:
        """Copy ``learner`` to ``device``. For the other parameters see ``TorchEngine``."""
        super().__init__(deepcopy(learner).to(device).requires_grad_(False), stop_ids, max_concurrent_sequences)
        self._learner = learner

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Copy the policy's weights. Must not be called during a generation."""
        # By name: a forward pass with an adapter on experts changes the order of their parameters.
        learned = dict(self._learner.named_parameters())
        for name, copied in self._model.named_parameters():
            copied.copy_(learned[name])
