"""Decoding without static buffers: each step reads only the rows and columns of the cache that are in use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.contract.arrays import IntArray
from quartet.models.forward.model_capabilities import accepts_argument, attends_to_all, device_of
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.generation.decode_cache import BatchCache, Step, attends, cache_argument


class WindowDecoder:
    """Decoder that reads only the rows and columns in use.

    All rows end in the same column of the cache. A new prompt is aligned to that column, and the columns before it are masked.
    """

    def __init__(self, model: Any, slots: int, longest: int, limit: int, refilled: bool) -> None:
        """``longest``: tokens of a prompt; ``limit``: tokens of a response; ``refilled``: finished rows are replaced."""
        self._model, device = model, device_of(model)
        self._cache_argument, self._attends = cache_argument(model), attends(model)
        columns = longest + limit
        if refilled:
            # Spare columns, so that the cache does not have to move to the left at every token.
            columns += max(columns // 4, 1)
        # Rounded up, because fast attention kernels on GPUs need mask rows that start at multiples of 16 bytes.
        self._slots, self._capacity = slots, -(-columns // 8) * 8
        # Columns [start, end) of the cache are in use. Prompts end at ``min_end``, so none may be longer.
        self._start = self._end = self._min_end = longest
        self._cache: BatchCache | None = None
        self._padding = _Padding(model, slots, self._capacity, device)
        self._resting = np.zeros(slots, np.bool_)
        # Position of the next token of each row.
        self._positions = torch.zeros((slots, 1), dtype=torch.int64, device=device)

    def fill(self, rows: list[int], sources: list[int], lengths: list[int], prefilled: Any) -> None:
        """Copy prompts, and align their ends with the rows in use.

        Row ``rows[i]`` becomes the ``lengths[i]`` first tokens of row ``sources[i]`` of ``prefilled``. The columns before them
        hold arbitrary finite values, which attention multiplies by 0.
        """
        if self._cache is None:
            self._cache = BatchCache(prefilled, self._slots, self._capacity)
        columns, device = max(lengths), self._positions.device
        to, source = torch.tensor(rows, device=device), torch.tensor(sources, device=device)
        column = torch.arange(columns, device=device) - (columns - torch.tensor(lengths, device=device)[:, None])
        self._cache.fill(to, source, slice(self._end - columns, self._end), prefilled, column.clamp(min=0))
        self._start = min(self._start, self._end - columns)

    def begin(self, slots: slice, prompts: list[IntArray]) -> None:
        """Register the prompts that ``slots`` now hold. They are the last slots in use."""
        counts = torch.tensor([len(prompt) for prompt in prompts], device=self._positions.device)[:, None]
        self._positions[slots] = counts
        self._padding.begin(slots, self._end - counts)

    @onednn_linear()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Decode one more token of each row, int64 [rows]. Return the next logits [rows, vocabulary]."""
        assert self._cache is not None
        rows = len(token_ids)
        if self._end == self._capacity:
            self._move_left(rows)
        columns = slice(self._start, self._end + 1)
        arguments = self._padding.arguments(rows, columns.start, columns.stop) if self._attends else {}
        if accepts_argument(self._model, "position_ids"):
            arguments["position_ids"] = self._positions[:rows]
        arguments[self._cache_argument] = self._cache.for_step(Step(rows, columns))
        logits: torch.Tensor = self._model(input_ids=token_ids[:, None], use_cache=True, **arguments).logits
        self._end += 1
        self._positions += 1
        return logits[:, -1]

    def _move_left(self, rows: int) -> None:
        """Move the columns in use to the left, as far as the longest prompt permits."""
        assert self._cache is not None
        left = min(self._start, self._end - self._min_end)
        if not left:
            # A finished row may have held its columns for longer than any row decodes.
            self._start = self._padding.cut(np.flatnonzero(self._resting), self._end)
            left = min(self._start, self._end - self._min_end)
        assert left > 0
        self._cache.move_columns(rows, slice(self._start, self._end), left)
        self._start -= left
        self._end -= left
        self._padding.move(left)

    def rest(self, rows: NDArray[np.int64]) -> None:
        """Reset finished rows to position 0. Their results are ignored until they are removed."""
        self._resting[rows] = True
        self._positions[torch.from_numpy(rows).to(self._positions.device)] = 0

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Move rows ``movers`` into ``holes``, then keep the first ``rows`` rows."""
        assert self._cache is not None
        self._resting[:] = False
        self._positions[holes] = self._positions[movers]
        start = self._padding.keep(rows, holes, movers)
        self._start = self._end if start is None else start
        self._cache.move_rows(holes, movers, slice(self._start, self._end))


class _Padding:
    """Mask of the columns before each row's prompt, in the cheapest form that the model supports."""

    def __init__(self, model: Any, slots: int, capacity: int, device: torch.device) -> None:
        self._begins = np.zeros(slots, np.int64)
        """The first column of each row."""
        self._columns = torch.arange(capacity, device=device)
        self._rows = 0
        self._additive = _accepts_additive_mask(model)
        self._hidden = torch.zeros((), device=device, dtype=torch.int64)
        self._shown = self._hidden + 1
        if self._additive:
            dtype = model.get_input_embeddings().weight.dtype
            # Half of the minimum: adding a score to the minimum can overflow in half precision.
            self._hidden = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
            self._shown = torch.zeros_like(self._hidden)
        self._mask = self._shown.expand(slots, capacity).clone()

    def begin(self, slots: slice, begins: torch.Tensor) -> None:
        """Add rows in ``slots`` whose first columns are ``begins`` [rows, 1]."""
        self._begins[slots] = begins[:, 0].cpu().numpy()
        self._rows = slots.stop
        self._mask[slots] = torch.where(self._columns >= begins, self._shown, self._hidden)

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor) -> int | None:
        """Move rows ``movers`` into ``holes``, then keep the first ``rows`` rows. Return their first column, or None."""
        self._rows = rows
        self._begins[holes.cpu().numpy()] = self._begins[movers.cpu().numpy()]
        self._mask[holes] = self._mask[movers]
        return int(self._begins[:rows].min()) if rows else None

    def cut(self, rows: NDArray[np.int64], begin: int) -> int:
        """Make ``rows`` begin at this column. Return the first column of all rows. Call ``move`` next, which masks them."""
        self._begins[rows] = begin
        return int(self._begins[: self._rows].min())

    def move(self, columns: int) -> None:
        """Follow a move of the cache by this number of columns to the left."""
        self._begins -= columns
        begins = torch.from_numpy(self._begins[:, None]).to(self._columns.device)
        self._mask.copy_(torch.where(self._columns >= begins, self._shown, self._hidden))

    def arguments(self, rows: int, start: int, stop: int) -> dict[str, Any]:
        """Return the model's mask argument for columns [start, stop), or no argument if no row has padding there."""
        if int(self._begins[: self._rows].max()) <= start:
            return {}
        mask = self._mask[:rows, start:stop]
        return {"attention_mask": mask[:, None, None, :] if self._additive else mask}


def _accepts_additive_mask(model: Any) -> bool:
    """Return whether every layer of the model interprets an additive mask [rows, 1, 1, columns] in the same way.

    Then the model does not have to build a mask from the padding at every token. False for sliding windows, because each kind of
    layer has its own mask, and for models that derive positions from the padding mask (ALiBi).
    """
    plain = getattr(model.config.get_text_config(), "_attn_implementation", None) in ("sdpa", "eager")
    return plain and attends_to_all(model) and accepts_argument(model, "position_ids")
