"""Decoding with static buffers: every step of one size does the same work at the same addresses, so that it can be replayed.

A decode step of a small model is hundreds of operations that take longer to launch than to run. On a GPU, a captured CUDA graph
launches them all at once. On a CPU, a recording repeats them without the Python code of the model. The tokens of each row start
at column 0, and the size of a step is rounded up to one of a few sizes. The engine tries each model once; a model that does not
support it uses ordinary decoding.

On a CPU the sizes are chosen so that they change no bit of a row, see docs/adr/0025-the-same-bits-in-any-batch.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn
from transformers import AttentionInterface

from quartet.contract.arrays import IntArray
from quartet.model_files.memory import CACHE_COLUMNS, graph_columns
from quartet.models.forward.model_capabilities import (
    accepts_argument,
    attends_to_all,
    attention_implementation,
    device_of,
    vocabulary_size,
)
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.packing import TOLERANCE
from quartet.models.generation.decode_cache import BatchCache, Step, attends, cache_argument, prefill_cache
from quartet.models.generation.recording import NotRecordable, record

log = structlog.get_logger()

COLUMNS_CPU = 32
"""A step on a CPU reads a multiple of this number of cache columns. For a GPU see ``graph_columns``."""
MIN_PRODUCT = 400
"""Columns x head size of a matmul that torch computes with its matmul library. It computes smaller ones in plain loops,
which round in another way."""
ATTENTION_NAME = "quartet_decode"
"""Name of this module's attention in transformers' registry."""
KEEP_BYTES = 2**26
"""Size of buffers that are kept during an update of the policy."""
TRIAL = ((5, 3), 3)
"""Prompt lengths of the trial, and the number of tokens that it decodes."""
_capturing = threading.Lock()
"""Held during a capture, because all captures of a device use one stream."""


class StaticDecoder:
    """Decoder with buffers that later generations reuse, and with replays of the steps over these buffers.

    The buffers fit the largest generation so far: slots x (longest prompt + longest response), rounded up to CACHE_COLUMNS, or
    to ``graph_columns``.
    ``graphs``: replay CUDA graphs, with few sizes. Otherwise a row's bits do not depend on the other rows. ``recorded``: then
    replay recordings. Without both, each step is computed op by op. ``checked``: before the capture of a graph, check that the
    step never waits for the device.
    """

    def __init__(self, model: Any, graphs: bool, recorded: bool = False, checked: bool = False) -> None:
        self._model, self._graphs, self._recorded, self._device = model, graphs, recorded, device_of(model)
        self._checked = checked
        self._held = (0, 0)
        self._slots = 0
        self._cache_argument = cache_argument(model)
        self._cache: BatchCache | None = None
        self._steps: dict[tuple[int, int], Callable[[], object]] = {}
        self._addresses: list[int] = []

    @property
    def graphs(self) -> bool:
        """Return whether steps are replayed as CUDA graphs."""
        return self._graphs

    @property
    def recorded(self) -> bool:
        """Return whether steps are replayed as recordings."""
        return self._recorded

    def prepare(self, slots: int, columns: int) -> None:
        """Start a generation of up to ``slots`` rows with at most ``columns`` tokens each. Clears the previous generation."""
        # With graphs, the size of a step must not depend on the buffers of earlier generations: a process that was restarted has
        # others, and rounding depends on the size.
        columns = graph_columns(columns) if self._graphs else -(-columns // CACHE_COLUMNS) * CACHE_COLUMNS
        self._slots = slots = slots if self._graphs else padded_rows(slots)
        rows_held, columns_held = self._held
        if slots > rows_held or columns > columns_held:
            self._held = max(slots, rows_held), max(columns, columns_held)
            self._allocate()
        addresses = [parameter.data_ptr() for parameter in self._model.parameters()]
        if addresses != self._addresses:
            # Updates write the weights in place. If anything else replaces them, captured graphs would read the old ones.
            self._forget_steps()
            self._addresses = addresses
        # Required: attention multiplies hidden columns by 0, so a NaN of a previous generation would reach every row.
        for buffer in (self._positions, *(self._cache.tensors if self._cache else ())):
            buffer.zero_()
        self._lengths = np.zeros(self._held[0], np.int64)

    def _allocate(self) -> None:
        rows, columns = self._held
        self._forget_steps()
        self._cache = None
        self._logits: torch.Tensor | None = None
        self._token_ids = torch.zeros((rows, 1), dtype=torch.int64, device=self._device)
        self._positions = torch.zeros((rows, 1), dtype=torch.int64, device=self._device)
        self._rows, self._columns = (torch.arange(count, device=self._device) for count in (rows, columns))
        dtype = self._model.get_input_embeddings().weight.dtype
        self._shown = torch.zeros((), dtype=dtype, device=self._device)
        # Half of the minimum: adding a score to the minimum can overflow in half precision.
        self._hidden = self._shown + torch.finfo(dtype).min / 2

    def _forget_steps(self) -> None:
        self._steps.clear()
        # Graphs share one memory pool. The pool is freed with the last graph, and its handle cannot be reused.
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None

    def release(self, everything: bool = False) -> None:
        """Free the buffers before an update of the policy, unless they are small, or graphs replay over them and not
        ``everything`` is to be freed.
        """
        held = sum(buffer.numel() * buffer.element_size() for buffer in (self._cache.tensors if self._cache else ()))
        if everything or (held > KEEP_BYTES and not self._graphs):
            self._held = (0, 0)
            self._cache = self._logits = None
            self._forget_steps()

    def fill(self, rows: list[int], sources: list[int], lengths: list[int], prefilled: Any) -> None:
        """Copy the ``lengths[i]`` first tokens of row ``sources[i]`` of ``prefilled`` to row ``rows[i]``."""
        if self._cache is None:
            self._cache = BatchCache(prefilled, *self._held)
        to, source = (torch.tensor(indices, device=self._device) for indices in (rows, sources))
        # Copies the pads, too. They are masked until the row's tokens overwrite them.
        self._cache.fill(to, source, slice(0, max(lengths)), prefilled)

    def begin(self, slots: slice, prompts: list[IntArray]) -> None:
        """Register the prompts that ``slots`` now hold."""
        self._lengths[slots] = [len(prompt) for prompt in prompts]
        self._positions[slots] = torch.from_numpy(self._lengths[slots, None]).to(self._device)

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Decode one more token of each row, int64 [rows]. Return logits [rows, vocabulary], valid until the next call."""
        rows = len(token_ids)
        self._token_ids[:rows, 0] = token_ids
        self._step(self._step_rows(rows), self._step_columns(int(self._lengths[:rows].max()) + 1))()
        self._lengths[:rows] += 1
        self._positions[:rows] += 1
        assert self._logits is not None
        return self._logits[:rows]

    def _step_rows(self, rows: int) -> int:
        """Return the rows to compute for the first ``rows`` rows."""
        if not self._graphs:
            return padded_rows(rows)
        size = self._slots
        while size > 1 and (size + 1) // 2 >= rows:
            size = (size + 1) // 2
        return size

    def _step_columns(self, columns: int) -> int:
        """Return the columns to read if ``columns`` are in use."""
        if self._graphs:
            return graph_columns(columns)
        assert self._cache is not None
        if not self._cache.head_size:
            return min(COLUMNS_CPU, self._held[1])
        columns = max(columns, -(-MIN_PRODUCT // self._cache.head_size))
        return min(-(-columns // COLUMNS_CPU) * COLUMNS_CPU, self._held[1])

    def rest(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Reset finished ``rows`` int64 [finished] to their first column. Their results are ignored until they are removed."""
        self._lengths[rows] = 0
        self._positions[torch.from_numpy(rows).to(self._device)] = 0

    def keep(self, rows: int, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Move rows ``movers`` int64 [moved] into ``holes`` [moved], then keep the first ``rows`` rows."""
        self._lengths[holes.cpu().numpy()] = self._lengths[movers.cpu().numpy()]
        if len(holes):
            assert self._cache is not None
            self._cache.move_rows(holes, movers, slice(0, int(self._lengths[:rows].max())))
            self._positions[holes] = self._positions[movers]
        # A step may compute the other rows, too, so their positions must be inside the buffer.
        self._positions[rows:] = 0

    def _step(self, rows: int, columns: int) -> Callable[[], object]:
        """Return the function that computes a step of this size."""
        key = rows, columns
        compute = partial(self._compute, rows, columns)
        if not (self._graphs or self._recorded):
            # Not kept: it refers to this decoder, and the cycle would keep the model in memory after its replacement.
            return compute
        if key not in self._steps:
            self._steps[key] = self._replayed(compute)
        return self._steps[key]

    def _replayed(self, compute: Callable[[], None]) -> Callable[[], object]:
        """Return a function that repeats ``compute``. Leaves the cache as it is."""
        assert self._cache is not None
        # Computing a step again writes the same keys and values, but other states.
        states = [state.clone() for state in self._cache.states]
        if self._graphs:
            replay: Callable[[], object] = _captured(compute, self._device, self._pool, self._checked)
        else:
            if self._logits is None:
                compute()  # Allocates the logits, which must exist before the recording.
            replay = record(compute)
        for state, before in zip(self._cache.states, states, strict=True):
            state.copy_(before)
        return replay

    @onednn_linear()
    def _compute(self, rows: int, columns: int) -> None:
        """Compute a step for the first ``rows`` rows, used or not. Rows are independent."""
        positions = self._positions[:rows]
        mask = torch.where(self._columns[:columns] <= positions, self._shown, self._hidden)[:, None, None]
        assert self._cache is not None
        attends = bool(self._cache.head_size)
        arguments: dict[str, Any] = {"attention_mask": mask} if attends else {}
        if accepts_argument(self._model, "position_ids"):
            arguments["position_ids"] = positions
        step = Step(rows, slice(columns), (self._rows[:rows], positions[:, 0]))
        arguments[self._cache_argument] = self._cache.for_step(step)
        with attention_implementation(self._model, ATTENTION_NAME if attends and not self._graphs else None):
            logits = self._model(input_ids=self._token_ids[:rows], use_cache=True, **arguments).logits[:, -1]
        if self._logits is None:
            self._logits = logits.new_zeros(self._held[0], logits.shape[1])
        # One buffer for all graphs; otherwise each graph would keep separate logits.
        self._logits[:rows] = logits


def padded_rows(rows: int) -> int:
    """Return the number of rows to compute on a CPU, so that a row's bits do not depend on it: a multiple of 4.

    A matmul of fewer than 4 rows rounds in another way, and with several threads any other number does.
    """
    multiple = 4 if rows <= 16 else 8
    return -(-rows // multiple) * multiple


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token of each row: query [rows, heads, 1, head size] -> [rows, 1, heads, head size].

    Plain matmuls of one row and head at a time, which round in the same way for every number of rows, columns and threads. The
    fused attention of torch does not, and is no faster for one token. The signature is that of attention functions in
    transformers.
    """
    rows, heads, _tokens, size = query.shape
    groups = key.shape[1]
    scores = torch.matmul(query.reshape(rows, groups, heads // groups, size), key.transpose(2, 3))
    scores = scores * (size**-0.5 if scaling is None else scaling) + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def _captured(compute: Callable[[], None], device: torch.device, pool: Any, checked: bool) -> Callable[[], None]:
    """Return a replay of ``compute`` as a CUDA graph, captured after a first call that initializes libraries.

    ``checked``: first call it once more, and raise RuntimeError if it waits for the device. A capture that fails for that reason
    leaves the device in a worse state.
    """
    with _capturing, torch.cuda.device(device):
        before = torch.cuda.current_stream()
        stream = _capture_stream(device)
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                compute()
                if checked:
                    with _synchronization_refused():
                        compute()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may use the GPU during the capture, such as another service or a status request.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                compute()
        except BaseException:
            _abandon_capture(device, pool)
            raise
        finally:
            # If the end of a capture fails, torch leaves the thread on the stream of the capture.
            torch.cuda.set_stream(before)
    replay: Callable[[], None] = graph.replay
    return replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device.

    The allocator reuses the memory of a pool only on the stream that allocated it, and cuBLAS keeps a workspace for each stream.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _abandon_capture(device: torch.device, pool: Any) -> None:
    """End the use of a memory pool by a capture that failed. Without effect if the capture had not begun.

    If the end of a capture fails, torch skips this. The allocator then counts the capture as unfinished for the life of the
    process, and does not give back unused memory when it runs out.
    """
    # An error says that the pool is not in use by a capture.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


@contextmanager
def _synchronization_refused() -> Iterator[None]:
    """Raise RuntimeError at an operation inside the context that waits for a GPU. It applies to all threads of the process."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@torch.inference_mode()
def is_recordable(model: Any) -> bool:
    """Return whether replays of a recorded step give the same bits as the step. Logs the reason if they do not."""
    plain, recorded = (StaticDecoder(model, graphs=False, recorded=recorded) for recorded in (False, True))
    try:
        same = torch.equal(_trial_logits(model, plain), _trial_logits(model, recorded))
        reason = "the logits differ"
    except torch.OutOfMemoryError:
        raise
    except (NotRecordable, AttributeError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        same, reason = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not same:
        log.info("decodes without recorded steps", model=type(model).__name__, reason=reason)
    return same


@torch.inference_mode()
def unsupported_reason(model: Any, graphs: bool) -> str | None:
    """Return why the model does not support static decoding, or None if a trial of a few tokens succeeded.

    Raises OutOfMemoryError if the trial does: the results of a run must not depend on the free memory.
    """
    supported = accepts_argument(model, "position_ids") and _implementation(model) == "sdpa"
    if attends(model) and not (supported and attends_to_all(model, beside_states=True)):
        return "attention with a window or an index, positions from the padding mask, or an attention other than sdpa"
    try:
        difference = _difference(model, StaticDecoder(model, graphs, checked=True))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    tolerance = TOLERANCE[model.get_input_embeddings().weight.dtype]
    # This also refuses a difference of NaN.
    return (
        None if difference <= tolerance else f"logits differ by {difference:.2g} of the largest, {tolerance:g} allowed"
    )


def _implementation(model: Any) -> str | None:
    result: str | None = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return result


def _trial_ids(model: Any) -> torch.Tensor:
    lengths, tokens = TRIAL
    columns = max(lengths) + tokens
    return torch.arange(len(lengths) * columns, device=device_of(model)).view(-1, columns) % vocabulary_size(model)


def _trial_logits(model: Any, decoder: StaticDecoder) -> torch.Tensor:
    """Decode the tokens of the trial. Return the logits [tokens x rows, vocabulary]."""
    lengths, tokens = TRIAL
    ids, rows = _trial_ids(model), list(range(len(lengths)))
    decoder.prepare(len(rows), ids.shape[1])
    for row, length in enumerate(lengths):
        prefilled = prefill_cache(model)
        model(input_ids=ids[row : row + 1, :length], use_cache=True, **{cache_argument(model): prefilled})
        decoder.fill([row], [0], [length], prefilled)
    decoder.begin(slice(0, len(rows)), [ids[row, :length].cpu().numpy() for row, length in enumerate(lengths)])
    inputs = [
        torch.stack([ids[row, length + offset] for row, length in enumerate(lengths)]) for offset in range(tokens)
    ]
    return torch.cat([decoder.logits(token_ids).clone() for token_ids in inputs])


def _difference(model: Any, decoder: StaticDecoder) -> float:
    """Return the largest difference from the logits of whole sequences without a cache, relative to the largest logit."""
    lengths, tokens = TRIAL
    ids = _trial_ids(model)
    ends = [(row, length + offset + 1) for offset in range(tokens) for row, length in enumerate(lengths)]
    expected = torch.cat([model(input_ids=ids[row : row + 1, :end]).logits[:, -1] for row, end in ends]).float()
    return float((_trial_logits(model, decoder).float() - expected).abs().max() / expected.abs().max())
