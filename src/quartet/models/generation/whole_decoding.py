"""Decoding without a cache: each step computes all tokens of the rows again.

It is for models whose cache does not fit a batch of sequences of different lengths. Each token costs as much as a forward pass
over its whole sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.contract.arrays import IntArray
from quartet.models.forward.model_capabilities import device_of
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.packing import logits_at_positions


class WholeDecoder:
    """Decoder that keeps the tokens of each row, from column 0."""

    def __init__(self, model: Any, slots: int, columns: int) -> None:
        """``columns``: tokens of the longest sequence."""
        self._model = model
        self._token_ids = torch.zeros((slots, columns), dtype=torch.int64, device=device_of(model))
        self._lengths = np.zeros(slots, np.int64)

    def fill(self, *_: Any) -> None:
        """Do nothing: prompts leave nothing in a cache."""

    def begin(self, slots: slice, prompts: list[IntArray]) -> None:
        """Register the prompts that ``slots`` now hold."""
        for slot, prompt in zip(range(slots.start, slots.stop), prompts, strict=True):
            self._token_ids[slot, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
            self._lengths[slot] = len(prompt)

    @onednn_linear()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Decode one more token of each row, int64 [rows]. Return the next logits [rows, vocabulary]."""
        rows = len(token_ids)
        lengths = self._lengths[:rows]
        last = torch.from_numpy(lengths.copy()).to(token_ids.device)
        self._token_ids[torch.arange(rows, device=token_ids.device), last] = token_ids
        lengths += 1
        columns = int(lengths.max())
        marked = torch.arange(columns, device=token_ids.device) == last[:, None]
        return logits_at_positions(self._model, self._token_ids[:rows, :columns], marked, use_cache=False)

    def rest(self, rows: NDArray[np.int64]) -> None:
        """Cut finished rows to no token. Their results are ignored until they are removed."""
        self._lengths[rows] = 0

    def keep(self, _rows: int, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Move rows ``movers`` into ``holes``."""
        self._token_ids[holes] = self._token_ids[movers]
        self._lengths[holes.cpu().numpy()] = self._lengths[movers.cpu().numpy()]
