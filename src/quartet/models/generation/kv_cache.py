"""Key-value cache of a batch that is being decoded, in memory that is allocated once.

A cache that grows by concatenation copies everything at every token. For small models that is most of a decode step. This cache
writes a new token in place, and its layers pass attention a view. A row from the end replaces each finished row, so the active
rows stay in front. Columns that are padding in every active row are left out of the view.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quartet.errors import ModelError
from quartet.model_files.model_support import uncacheable_reason

# The interface of a cache layer in transformers. Its annotations allow layers without keys.
_CacheLayer: Any = CacheLayerMixin


class _Window:
    """The part of the buffers in use, shared by all layers: rows [0, rows), columns [start, end)."""

    def __init__(self, rows: int, end: int) -> None:
        self.rows, self.start, self.end = rows, 0, end


class BufferLayer(_CacheLayer):  # type: ignore[misc]
    """Cache layer for transformers models: keys and values [rows, heads, columns, head size]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise NotImplementedError. transformers does not call it, because the buffers exist from the start."""
        raise NotImplementedError


class _Layer(BufferLayer):
    """A layer that exposes only the window in use."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: _Window) -> None:
        super().__init__(keys, values)
        self.window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values [rows, heads, 1, head size] and return all that are in use."""
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
    """The cache of one batch. ``layers`` is the model's ``past_key_values`` while it decodes one token at a time.

    All rows end in the same column. The caller keeps track of the first column of each row and masks the columns before it.
    """

    def __init__(self, rows: int, end: int, capacity: int) -> None:
        """Prompts end at column ``end``, so none may be longer. ``capacity``: all columns, for prompts and decoded tokens."""
        self._shape, self._min_end = (rows, capacity), end
        self._window = _Window(0, end)
        self._window.start = end
        self.layers: Any = None

    @property
    def start(self) -> int:
        """First column in use."""
        return self._window.start

    @property
    def end(self) -> int:
        """Index after the last column in use."""
        return self._window.end

    @property
    def capacity(self) -> int:
        """Total number of columns."""
        return self._shape[1]

    @property
    def full(self) -> bool:
        """Return whether no column is left for another token."""
        return self.end == self.capacity

    @property
    def rows(self) -> int:
        """Number of rows in use. They are the first ones."""
        return self._window.rows

    @rows.setter
    def rows(self, rows: int) -> None:
        self._window.rows = rows

    def fill(self, rows: list[int], sources: list[int], lengths: list[int], prefilled: Any) -> None:
        """Copy prompts that were computed with right padding, and align their ends with the rows in use.

        Row ``rows[i]`` becomes the ``lengths[i]`` tokens of row ``sources[i]`` of ``prefilled``, a filled DynamicCache. The
        columns before them hold arbitrary finite values, which attention multiplies by 0.
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
            prompt = slice(end - columns, end)
            layer.keys[target, :, prompt] = filled.keys.transpose(1, 2)[source, column].transpose(1, 2)
            layer.values[target, :, prompt] = filled.values.transpose(1, 2)[source, column].transpose(1, 2)
        self._window.start = min(self.start, end - columns)

    def _allocate(self, prefilled: Any) -> None:
        rows, capacity = self._shape

        def buffer(like: torch.Tensor) -> torch.Tensor:
            return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])

        self.layers = Cache(
            layers=[_Layer(buffer(layer.keys), buffer(layer.values), self._window) for layer in prefilled.layers]
        )

    def advance(self) -> None:
        """Count the token that was just written to every layer."""
        self._window.end += 1

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor, start: int) -> None:
        """Move rows ``movers`` int64 [moved] into ``holes`` [moved], then keep the first ``rows`` rows and columns from
        ``start``.
        """
        window = self._window
        if len(holes):
            for layer in self.layers.layers:
                for buffer in (layer.keys, layer.values):
                    used = buffer[:, :, start : window.end]
                    used[holes] = used[movers]
        window.rows, window.start = rows, start

    def move_left(self) -> int:
        """Move the columns in use to the left, as far as the longest prompt permits. Return the number of columns."""
        window = self._window
        columns = min(window.start, window.end - self._min_end)
        for layer in self.layers.layers:
            for buffer in (layer.keys, layer.values):
                buffer[: window.rows, :, window.start - columns : window.end - columns] = buffer[
                    : window.rows, :, window.start : window.end
                ].clone()
        window.start -= columns
        window.end -= columns
        return columns


def prefill_cache() -> Any:
    """Return a cache for a forward pass over whole prompts. Sliding-window layers keep all columns, too; the mask hides them."""
    return DynamicCache()


def check_cacheable(model: Any) -> None:
    """Raise ModelError if the model keeps other state than keys and values per token (recurrent or compressed state)."""
    reason = uncacheable_reason(model.config.to_dict())
    if reason is not None:
        raise ModelError(f"{type(model).__name__}: {reason}")
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    other = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if other:
        raise ModelError(
            f"{type(model).__name__}: the torch engine supports attention layers only, this model has {', '.join(other)}; "
            "choose another rollout.engine or model"
        )
