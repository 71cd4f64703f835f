"""Keys and values of a batch being decoded, in memory allocated once.

A cache that grows by concatenation copies everything at every token; for small models that is most of a decode step. Here a new
token is written in place, and the layers hand attention a view. Rows that are finished leave by having a row from the end moved
into their place, so that the live rows stay in front; columns that are padding in every row left fall out of the view.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quartet.errors import ModelError

# What transformers asks of a cache layer. Its own annotations leave room for layers without keys yet.
_CacheLayer: Any = CacheLayerMixin


class _Window:
    """The part of the buffers in use, shared by all layers: rows [0, rows), columns [start, end)."""

    def __init__(self, rows: int, end: int) -> None:
        self.rows, self.start, self.end = rows, 0, end


class BufferLayer(_CacheLayer):  # type: ignore[misc]
    """One layer's keys and values [rows, heads, columns, head size], as transformers' models use a cache layer."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Never called: the buffers are there from the start."""
        raise NotImplementedError


class _Layer(BufferLayer):
    """A layer of which only the window is in use."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: _Window) -> None:
        super().__init__(keys, values)
        self.window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values [rows, heads, 1, head size]; gives back all that are in use."""
        window = self.window
        rows, start, end = window.rows, window.start, window.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class DecodeCache:
    """The cache of one batch. ``layers`` is what a model takes as ``past_key_values`` while decoding, one token at a time.

    All rows end in the same column. Where a row begins is its owner's to know, and to hide what stands before it.
    """

    def __init__(self, rows: int, end: int, capacity: int) -> None:
        """``end``: columns that every prompt has room in; ``capacity``: all columns, of prompts and of what is decoded."""
        self._shape, self._least = (rows, capacity), end
        self._window = _Window(0, end)
        self._window.start = end
        self.layers: Any = None

    @property
    def start(self) -> int:
        """The first column in use."""
        return self._window.start

    @property
    def end(self) -> int:
        """The column after the last in use."""
        return self._window.end

    @property
    def capacity(self) -> int:
        """All columns there are."""
        return self._shape[1]

    @property
    def full(self) -> bool:
        """Return whether there is no column for another token."""
        return self.end == self.capacity

    @property
    def rows(self) -> int:
        """The first so many rows are in use."""
        return self._window.rows

    @rows.setter
    def rows(self, rows: int) -> None:
        self._window.rows = rows

    def fill(self, rows: list[int], sources: list[int], lengths: list[int], prefilled: Any) -> None:
        """Take over prompts computed with right padding, aligning them to end where the rows in use do.

        Row ``rows[i]`` becomes the ``lengths[i]`` tokens of row ``sources[i]`` of ``prefilled``, a filled DynamicCache. What
        stands before them is arbitrary but finite: attention multiplies it by 0.
        """
        if self.layers is None:
            self._allocate(prefilled)
        columns, end = max(lengths), self.end
        device = prefilled.layers[0].keys.device
        target = torch.tensor(rows, device=device)
        source = torch.tensor(sources, device=device)[:, None]
        column = torch.arange(columns, device=device) - (columns - torch.tensor(lengths, device=device)[:, None])
        column = column.clamp(min=0)
        for layer, filled in zip(self.layers.layers, prefilled.layers, strict=True):
            # Indexing with two index tensors around a slice puts the heads last: [rows, columns, heads, head size].
            place = slice(end - columns, end)
            layer.keys[target, :, place] = filled.keys.transpose(1, 2)[source, column].transpose(1, 2)
            layer.values[target, :, place] = filled.values.transpose(1, 2)[source, column].transpose(1, 2)
        self._window.start = min(self.start, end - columns)

    def _allocate(self, prefilled: Any) -> None:
        rows, capacity = self._shape

        def buffer(like: torch.Tensor) -> torch.Tensor:
            return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])

        self.layers = Cache(
            layers=[_Layer(buffer(layer.keys), buffer(layer.values), self._window) for layer in prefilled.layers]
        )

    def advance(self) -> None:
        """Count the token that every layer has just been given."""
        self._window.end += 1

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor, start: int) -> None:
        """Move rows ``movers`` into ``holes`` and keeps the first ``rows``, and the columns from ``start``."""
        window = self._window
        if len(holes):
            for layer in self.layers.layers:
                for buffer in (layer.keys, layer.values):
                    used = buffer[:, :, start : window.end]
                    used[holes] = used[movers]
        window.rows, window.start = rows, start

    def move_left(self) -> int:
        """Move what is in use to the left, as far as the longest prompt leaves room, and gives by how many columns."""
        window = self._window
        columns = min(window.start, window.end - self._least)
        for layer in self.layers.layers:
            for buffer in (layer.keys, layer.values):
                buffer[: window.rows, :, window.start - columns : window.end - columns] = buffer[
                    : window.rows, :, window.start : window.end
                ].clone()
        window.start -= columns
        window.end -= columns
        return columns


def prefill_cache() -> Any:
    """A cache for one forward pass over whole prompts. Whole layers even for sliding windows: the mask does the windowing."""
    return DynamicCache()


def check_cacheable(model: Any) -> None:
    """Raise ModelError for a model that keeps more than keys and values per token (recurrent or compressed state)."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    other = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if other:
        raise ModelError(
            f"{type(model).__name__}: the torch engine decodes attention layers only, this model has {', '.join(other)}; "
            "choose another rollout.engine or model"
        )
