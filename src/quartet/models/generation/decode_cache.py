"""What a model keeps of each sequence between tokens, for a batch that is being decoded, in memory that is allocated once.

A cache that grows by concatenation copies everything at every token. For small models that is most of a decode step. Here a new
token is written in place, and attention gets a view. The cache classes of transformers say what a layer keeps: keys, values and
keys of an index per token; convolution and recurrent states per sequence; both; or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from quartet.models.forward.model_capabilities import accepts_argument

# Layers of transformers, without their annotations, which allow layers without tensors.
_TokenInterface: Any = CacheLayerMixin
_StateInterface: Any = LinearAttentionLayer
_NoMemory: Any = DummyLayer

_WITHOUT_WINDOW: dict[type, type] = {
    DynamicSlidingWindowLayer: DynamicLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: LinearAttentionAndFullAttentionLayer,
}
"""The layers that are used for those with a window. They keep all columns, because rows end at different positions. The mask
hides the columns before the window."""
_SUPPORTED = {
    *(DynamicLayer, DynamicIndexedLayer, DummyLayer),
    *(LinearAttentionLayer, LinearAttentionAndFullAttentionLayer),
}


def cache_argument(model: Any) -> str:
    """Return the name of the model's argument for a cache, or "". Models without attention call it cache_params."""
    return next((name for name in ("past_key_values", "cache_params") if accepts_argument(model, name)), "")


def prefill_cache(model: Any) -> Any:
    """Return a cache for a forward pass over whole prompts."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in _WITHOUT_WINDOW:
            states = {"number_of_states": layer.number_of_states} if isinstance(layer, LinearAttentionLayer) else {}
            cache.layers[index] = _WITHOUT_WINDOW[type(layer)](**states)
    return cache


def unsupported_reason(model: Any) -> str | None:
    """Return why sequences of different lengths cannot be decoded in one batch with a cache, or None."""
    if not cache_argument(model):
        return "its class in transformers takes no cache"
    other = sorted({type(layer).__name__ for layer in prefill_cache(model).layers if type(layer) not in _SUPPORTED})
    return f"its cache in transformers has layers of class {', '.join(other)}" if other else None


def attends(model: Any) -> bool:
    """Return whether a layer keeps keys and values."""
    return any(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=model.config).layers)


class Step(NamedTuple):
    """The part of the memory that one step of decoding uses.

    ``rows``: number of the first rows, which are computed. ``columns``: those that attention reads, with the new tokens.
    ``new``: index of the new tokens in this part, rows and columns, int64 [rows] each. By default they are in the last column.
    """

    rows: int
    columns: slice
    new: tuple[Any, Any] = (slice(None), -1)


class BatchCache:
    """Memory for what the layers of a model keep of up to ``slots`` sequences of up to ``columns`` tokens."""

    def __init__(self, prefilled: Any, slots: int, columns: int) -> None:
        """Allocate zeros like the tensors of ``prefilled``, a cache after a forward pass. Raises ValueError."""
        self._layers = [_Memory(layer, slots, columns) for layer in prefilled.layers]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [tensor for layer in self._layers for tensor in (*layer.of_tokens, *layer.of_rows)]

    @property
    def states(self) -> list[torch.Tensor]:
        """The tensors with one state per row."""
        return [tensor for layer in self._layers for tensor in layer.of_rows]

    @property
    def head_size(self) -> int:
        """The smallest head of attention, or 0 without attention."""
        return min((tensor.shape[-1] for layer in self._layers for tensor in layer.of_tokens[:2]), default=0)

    def fill(
        self, rows: torch.Tensor, sources: torch.Tensor, to: slice, prefilled: Any, columns: torch.Tensor | None = None
    ) -> None:
        """Copy the rows ``sources`` int64 [n] of ``prefilled`` to ``rows`` int64 [n], their tokens to the columns ``to``.

        ``columns`` int64 [n, width of ``to``]: the columns of ``prefilled`` that are copied, by default the first ones.
        """
        for memory, layer in zip(self._layers, prefilled.layers, strict=True):
            for target, filled in zip(memory.of_tokens, _of_tokens(layer), strict=True):
                if columns is None:
                    part = filled[..., : to.stop - to.start, :][sources]
                else:
                    # Columns second, so that they and the rows are indexed together.
                    part = filled.movedim(-2, 1)[sources[:, None], columns].movedim(1, -2)
                target[..., to, :][rows] = part
            for target, filled in zip(memory.of_rows, _of_rows(layer), strict=True):
                target[rows] = filled[sources]

    def move_rows(self, holes: torch.Tensor, movers: torch.Tensor, used: slice) -> None:
        """Copy rows ``movers`` int64 [moved], of which the columns ``used`` are in use, to the rows ``holes`` [moved]."""
        if len(holes):
            for layer in self._layers:
                for tensor in [*(tensor[..., used, :] for tensor in layer.of_tokens), *layer.of_rows]:
                    tensor[holes] = tensor[movers]

    def move_columns(self, rows: int, used: slice, left: int) -> None:
        """Move the columns ``used`` of the first ``rows`` rows to the left by ``left`` columns."""
        for layer in self._layers:
            for tensor in layer.of_tokens:
                tensor[:rows, ..., used.start - left : used.stop - left, :] = tensor[:rows, ..., used, :].clone()

    def for_step(self, step: Step) -> Any:
        """Return the cache that the model uses for one step, over this memory."""
        return Cache(layers=[layer.for_step(step) for layer in self._layers])


class _Memory:
    """Memory of one layer: ``of_tokens`` [slots, heads, columns, size] or [slots, columns, size], ``of_rows`` [slots, ...]."""

    def __init__(self, like: Any, slots: int, columns: int) -> None:
        self.of_tokens = [
            tensor.new_zeros(slots, *tensor.shape[1:-2], columns, tensor.shape[-1]) for tensor in _of_tokens(like)
        ]
        self.of_rows = [tensor.new_zeros(slots, *tensor.shape[1:]) for tensor in _of_rows(like)]
        self._like = None
        if isinstance(like, LinearAttentionLayer) and not self.of_rows:
            raise ValueError("a layer with a state has left none in the cache, so the model keeps it elsewhere")
        if self.of_rows:
            # Without the states of the prompts.
            self._like = LinearAttentionLayer(like.number_of_states)
            self._like.__dict__.update(_kinds_of_states(like))

    def for_step(self, step: Step) -> Any:
        """Return a layer of a cache over this memory."""
        tokens = [tensor[: step.rows, ..., step.columns, :] for tensor in self.of_tokens]
        if self._like is None:
            return _TokenLayer(tokens, step.new) if tokens else _NoMemory()
        states = [tensor[: step.rows] for tensor in self.of_rows]
        return _HybridLayer(self._like, states, tokens, step.new) if tokens else _StateLayer(self._like, states)


class _TokenLayer(_TokenInterface):  # type: ignore[misc]
    """Layer of keys and values [rows, heads, columns, size], and of the keys of an index [rows, columns, size] if it has one."""

    def __init__(self, tokens: list[torch.Tensor], new: tuple[Any, Any]) -> None:
        super().__init__()
        self.keys, self.values = tokens[:2]
        self.indexer_keys: Any = tokens[2] if len(tokens) > 2 else None
        self._new = new
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Raise NotImplementedError. transformers does not call it, because the memory exists from the start."""
        raise NotImplementedError

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' keys and values [rows, heads, 1, size] and return those of all columns."""
        rows, columns = self._new
        self.keys[rows, :, columns] = key_states[:, :, 0]
        self.values[rows, :, columns] = value_states[:, :, 0]
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' index keys [rows, 1, size] and return those of all columns."""
        keys: torch.Tensor = self.indexer_keys
        keys[self._new] = indexer_key_states[:, 0]
        return keys

    def get_seq_length(self) -> int:
        length: int = self.keys.shape[2]
        return length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return -1


class _StateLayer(_StateInterface):  # type: ignore[misc]
    """Layer of convolution and recurrent states. The base class writes them in place."""

    def __init__(self, like: Any, states: list[torch.Tensor]) -> None:
        _StateInterface.__init__(self, like.number_of_states)
        self.__dict__.update(_kinds_of_states(like))
        remaining = iter(states)
        self.conv_states = _filled(like.is_conv_states_initialized, remaining)
        self.recurrent_states = _filled(like.is_recurrent_states_initialized, remaining)


class _HybridLayer(_StateLayer, _TokenLayer):
    """Layer of states and of keys and values."""

    def __init__(self, like: Any, states: list[torch.Tensor], tokens: list[torch.Tensor], new: tuple[Any, Any]) -> None:
        _TokenLayer.__init__(self, tokens, new)
        _StateLayer.__init__(self, like, states)


def _of_tokens(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a filled layer that have a column per token."""
    names = ("keys", "values", "indexer_keys")
    return [tensor for name in names if (tensor := getattr(layer, name, None)) is not None]


def _of_rows(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a filled layer that have one state per row."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def _kinds_of_states(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer of states that do not depend on the rows."""
    names = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
    return {name: dict(getattr(layer, name)) for name in names} | {"device": layer.device, "dtype": layer.dtype}


def _filled(initialized: dict[int, bool], states: Iterator[torch.Tensor]) -> dict[int, torch.Tensor | None]:
    """Return the next state for each index that has one, and None for the others."""
    return {index: next(states) if has_state else None for index, has_state in initialized.items()}
