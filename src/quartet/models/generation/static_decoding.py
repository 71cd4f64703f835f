"""Decoding whose every step is the same work at the same addresses, so that on a GPU it can be captured once and replayed.

A decode step of a small model is hundreds of kernels that take longer to start than to run; a captured graph starts them all at
once. Each row keeps its tokens from column 0 of its own, and what a step reads is rounded up to one of a few sizes. Tried before
it is trusted: a model that does not fit decodes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from quartet.models.forward.model_capabilities import accepts_argument, attends_to_all, device_of, vocabulary_size
from quartet.models.forward.packing import TOLERANCE
from quartet.models.generation.kv_cache import BufferLayer, prefill_cache

COLUMNS = 64
"""A step reads a multiple of so many columns of the cache: a short cache is not read whole, and graphs stay few."""
TRIAL = ((5, 3), 3)
"""Prompt lengths of the trial, and how many tokens are decoded."""


class _Layer(BufferLayer):
    """A layer into which each row's new token is put at its own position."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: tuple[Any, ...]) -> None:
        super().__init__(keys, values)
        self._places = places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values [rows, heads, 1, head size]; gives back all columns."""
        self.keys[self._places] = key_states[:, :, 0]
        self.values[self._places] = value_states[:, :, 0]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class StaticDecoder:
    """Decodes in buffers that stay from one generation to the next, and on a GPU with the graphs that were captured over them.

    At most as much as the largest generation so far needs: slots x (longest prompt + longest response), rounded up to COLUMNS.
    ``capture``: replay graphs; without, the same step is computed op by op.
    """

    def __init__(self, model: Any, capture: bool) -> None:
        self._model, self._capture, self._device = model, capture, device_of(model)
        self._held = (0, 0)
        self._slots = 0
        self._keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}
        self._addresses: list[int] = []

    def prepare(self, slots: int, columns: int) -> None:
        """A generation begins: that many rows at once, none longer than so many tokens. Nothing of a former one is left."""
        columns = -(-columns // COLUMNS) * COLUMNS
        self._slots = slots
        rows_held, columns_held = self._held
        if slots > rows_held or columns > columns_held:
            self._held = max(slots, rows_held), max(columns, columns_held)
            self._allocate()
        addresses = [parameter.data_ptr() for parameter in self._model.parameters()]
        if addresses != self._addresses:
            # Updates write into the weights where they are. Where something else put others in their place, graphs read the old.
            self._forget_steps()
            self._addresses = addresses
        # Not only for tidiness: a NaN that a former generation left would reach every row, as attention multiplies it by 0.
        for buffer in (self._positions, *(buffer for pair in self._keys_values for buffer in pair)):
            buffer.zero_()
        self._lengths = np.zeros(self._held[0], np.int64)

    def _allocate(self) -> None:
        rows, columns = self._held
        self._forget_steps()
        self._keys_values = []
        self._logits: torch.Tensor | None = None
        self._token_ids = torch.zeros((rows, 1), dtype=torch.int64, device=self._device)
        self._positions = torch.zeros((rows, 1), dtype=torch.int64, device=self._device)
        self._rows, self._columns = (torch.arange(count, device=self._device) for count in (rows, columns))
        dtype = self._model.get_input_embeddings().weight.dtype
        self._shown = torch.zeros((), dtype=dtype, device=self._device)
        # Half of the least number: adding a score to the least itself can overflow in half precision.
        self._hidden = self._shown + torch.finfo(dtype).min / 2

    def _forget_steps(self) -> None:
        self._steps.clear()
        # Graphs share the memory that they compute in. It goes with the last of them, and its handle is good for no other.
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None

    def fill(self, rows: list[int], sources: list[int], lengths: list[int], prefilled: Any) -> None:
        """Row ``rows[i]`` becomes the ``lengths[i]`` tokens of row ``sources[i]`` of ``prefilled``, padded on the right."""
        if not self._keys_values:
            shapes = [(layer, (self._held[0], layer.keys.shape[1], self._held[1])) for layer in prefilled.layers]
            self._keys_values = [
                (
                    layer.keys.new_zeros(*shape, layer.keys.shape[3]),
                    layer.values.new_zeros(*shape, layer.values.shape[3]),
                )
                for layer, shape in shapes
            ]
        target = torch.tensor(rows, device=self._device)
        source = torch.tensor(sources, device=self._device)
        columns = max(lengths)
        for (keys, values), filled in zip(self._keys_values, prefilled.layers, strict=True):
            # Pads come along, and are hidden until the row's own tokens take their places.
            keys[target, :, :columns] = filled.keys[source, :, :columns]
            values[target, :, :columns] = filled.values[source, :, :columns]

    def begin(self, slots: slice, lengths: list[int]) -> None:
        """Prompts of these lengths stand in ``slots`` now."""
        self._lengths[slots] = lengths
        self._positions[slots] = torch.tensor(lengths, device=self._device)[:, None]

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """One more token for each row, int64 [rows]: what follows, [rows, vocabulary], good until the next call."""
        rows = len(token_ids)
        size = self._slots
        while size > 1 and (size + 1) // 2 >= rows:
            size = (size + 1) // 2
        columns = -(-(int(self._lengths[:rows].max()) + 1) // COLUMNS) * COLUMNS
        self._token_ids[:rows, 0] = token_ids
        self._step(size, columns)()
        self._lengths[:rows] += 1
        self._positions[:rows] += 1
        assert self._logits is not None
        return self._logits[:rows]

    def rest(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """These rows are finished, and are decoded unseen, each from its first column, until they are taken out."""
        self._lengths[rows] = 0
        self._positions[torch.from_numpy(rows).to(self._device)] = 0

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Move rows ``movers`` into ``holes`` and keeps the first ``rows``."""
        self._lengths[holes.cpu().numpy()] = self._lengths[movers.cpu().numpy()]
        if len(holes):
            columns = int(self._lengths[:rows].max())
            for buffer in (buffer for pair in self._keys_values for buffer in pair):
                used = buffer[:, :, :columns]
                used[holes] = used[movers]
            self._positions[holes] = self._positions[movers]
        # The others may be computed along with them, and must not stand where there is no column.
        self._positions[rows:] = 0

    def _step(self, rows: int, columns: int) -> Callable[[], None]:
        """Return what computes a step of so many rows and columns."""
        key = rows, columns
        if key not in self._steps:

            def compute() -> None:
                self._compute(rows, columns)

            self._steps[key] = _captured(compute, self._device, self._pool) if self._capture else compute
        return self._steps[key]

    def _compute(self, rows: int, columns: int) -> None:
        """The first so many rows, whichever of them are in use; rows know nothing of each other. Twice is as good as once."""
        positions = self._positions[:rows]
        mask = torch.where(self._columns[:columns] <= positions, self._shown, self._hidden)[:, None, None]
        places = self._rows[:rows], slice(None), positions[:, 0]
        layers: Any = [
            _Layer(keys[:rows, :, :columns], values[:rows, :, :columns], places) for keys, values in self._keys_values
        ]
        logits = self._model(
            input_ids=self._token_ids[:rows],
            position_ids=positions,
            attention_mask=mask,
            past_key_values=Cache(layers=layers),
            use_cache=True,
        ).logits[:, -1]
        if self._logits is None:
            self._logits = logits.new_zeros(self._held[0], logits.shape[1])
        # One buffer for all graphs: each would keep logits of its own.
        self._logits[:rows] = logits


def _captured(compute: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """``compute`` as a CUDA graph, captured after a first time that sets libraries up."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the GPU meanwhile: another service, or the status.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            compute()
    replay: Callable[[], None] = graph.replay
    return replay


@torch.inference_mode()
def unsupported_reason(model: Any, capture: bool) -> str | None:
    """Return why a model cannot decode this way, or None when it was tried on a few tokens and did.

    Too little memory is no reason but an error: a run's bits must not depend on what happens to be free.
    """
    if not (attends_to_all(model) and accepts_argument(model, "position_ids") and _attention(model) == "sdpa"):
        return "attention with a window, positions from the padding mask, or an attention other than sdpa"
    try:
        difference = _difference(model, capture)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    tolerance = TOLERANCE[model.get_input_embeddings().weight.dtype]
    # Not finite is not within it.
    return (
        None if difference <= tolerance else f"logits differ by {difference:.2g} of the largest, {tolerance:g} allowed"
    )


def _attention(model: Any) -> str | None:
    result: str | None = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return result


def _difference(model: Any, capture: bool) -> float:
    """Largest difference of logits between this way and whole sequences without a cache, over the largest logit."""
    lengths, tokens = TRIAL
    longest, device = max(lengths), device_of(model)
    ids = torch.arange(len(lengths) * (longest + tokens), device=device).view(len(lengths), -1) % vocabulary_size(model)
    decoder = StaticDecoder(model, capture)
    decoder.prepare(len(lengths), longest + tokens)
    prefilled = prefill_cache()
    model(input_ids=ids[:, :longest], past_key_values=prefilled, use_cache=True)
    rows = list(range(len(lengths)))
    decoder.fill(rows, rows, list(lengths), prefilled)
    decoder.begin(slice(0, len(rows)), list(lengths))
    expected, results = [], []
    for place in range(tokens):
        fed = torch.stack([ids[row, length + place] for row, length in enumerate(lengths)])
        results.append(decoder.logits(fed).clone())
        ends = [length + place + 1 for length in lengths]
        expected += [model(input_ids=ids[row : row + 1, :end]).logits[:, -1] for row, end in enumerate(ends)]
    whole = torch.cat(expected).float()
    return float((torch.cat(results).float() - whole).abs().max() / whole.abs().max())
