"""Rows of requests that torch decodes together, with the requests that wait for a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.contract.arrays import ExpertArray
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import uniforms
from quartet.engines.engine import EngineResponse, TurnSource
from quartet.engines.stop_strings import StopStrings
from quartet.errors import ComputationFailed
from quartet.model_files.memory import PREFILL_TOKENS
from quartet.models.forward.batching import micro_batches, right_pad
from quartet.models.forward.model_capabilities import (
    device_of,
    keeps_states,
    max_positions,
    vocabulary_size,
)
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.packing import logits_at_positions
from quartet.models.forward.router_replay import Routers
from quartet.models.generation.decode_cache import cache_argument, prefill_cache
from quartet.models.generation.penalties import Occurrences
from quartet.models.generation.sampling import sample_penalized, sample_tokens
from quartet.models.generation.static_decoding import StaticDecoder, padded_rows
from quartet.models.generation.trial import LogitDigests
from quartet.models.generation.whole_decoding import WholeDecoder
from quartet.models.generation.window_decoding import WindowDecoder

DROP_FRACTION = 1 / 8
"""Finished rows are replaced once they are at least this fraction of the batch. Until then their results are ignored."""


class DecodeSlots:
    """Rows that are decoded together, and the queue of waiting requests.

    A slot is a row of the batch. The first slots are in use. When enough of their rows have finished, rows from the end move into
    the finished slots, and queued requests get the slots that are then free.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        slots: int,
        static: StaticDecoder | None,
        stop_strings: StopStrings | None = None,
        turns: TurnSource | None = None,
        cached: bool = True,
        routers: Routers | None = None,
    ) -> None:
        """``requests`` are queued, or only decide the sizes if the requests come from ``turns``.

        ``cached``: the model decodes with a cache. ``routers``: responses have the experts that these choose. They need a cache,
        and not a ``static`` one.
        """
        self._model, self._sampling, self._seed, self._device = model, sampling, seed, device_of(model)
        self._stops = np.zeros(vocabulary_size(model), np.bool_)
        self._stops[[index for index in stop_ids if 0 <= index < len(self._stops)]] = True
        self._stop_strings, self._turns = stop_strings, turns
        self._queue = deque(requests if turns is None else ())
        slots, limit = min(slots, len(requests)), sampling.max_response_tokens
        self._slots = slots

        self.on_logits: LogitDigests | None = None
        self._rows: list[GenerationRequest] = []
        self._alive = np.zeros(0, np.bool_)
        self._greedy = np.zeros(slots, np.bool_)
        self._counts = np.zeros(slots, np.int64)
        self._limits = np.full(slots, limit, np.int64)
        self._token_ids = np.zeros((slots, limit), np.int32)
        self._log_probs = np.zeros((slots, limit), np.float32)

        self._routers = routers
        self._experts: list[list[ExpertArray]] = [[] for _ in range(slots)]

        self._fixed_shapes = static is not None and not static.graphs
        self._cached, self._unpadded = cached, cached and keeps_states(model)
        longest = max((len(request.prompt_ids) for request in requests), default=1)
        with torch.inference_mode():
            self._decoder: WindowDecoder | StaticDecoder | WholeDecoder
            if not cached:
                self._decoder = WholeDecoder(model, slots, longest + limit)
            elif static:
                static.prepare(slots, longest + limit)
                self._decoder = static
            elif turns is None:
                self._decoder = WindowDecoder(model, slots, longest, limit, refilled=slots < len(requests))
            else:
                # A later turn begins after all tokens before it.
                self._decoder = WindowDecoder(model, slots, longest + limit - 1, limit, refilled=True)
            self._streams = torch.zeros((slots, limit), dtype=torch.float64, device=self._device)
            self._draw_indices = torch.zeros((slots, 1), dtype=torch.int64, device=self._device)
            self._chosen = torch.zeros(slots, dtype=torch.int64, device=self._device)
            self._occurrences = (
                None if sampling.penalties is None else Occurrences(slots, vocabulary_size(model), self._device)
            )

    @property
    def active(self) -> bool:
        """Return whether any request is unfinished, or may still come."""
        return bool(self._alive.any() or self._queue or (self._turns is not None and self._turns.open))

    @property
    def last_token(self) -> int:
        """The token that ``step`` has drawn for the first row."""
        return int(self._chosen[0])

    def receive(self) -> bool:
        """Queue the turns that are ready, before waiting requests. Return whether there is a token to draw.

        With nothing to decode, wait a moment for a turn.
        """
        if self._turns is not None:
            idle = not (self._rows or self._queue)
            self._queue.extendleft(reversed(self._turns.take(wait=idle)))
        return bool(self._rows or self._queue)

    @torch.inference_mode()
    def step(self) -> list[EngineResponse]:
        """Draw every row's next token. Return the responses that this token finishes, ordered by id."""
        logits = self._decode() if self._rows else None
        free = self._slots - len(self._rows)
        if self._queue and free:
            joined = self._join([self._queue.popleft() for _ in range(min(free, len(self._queue)))])
            logits = joined if logits is None else torch.cat([logits, joined])
        assert logits is not None
        if self.on_logits is not None:
            self.on_logits(self._rows, self._alive, logits)
        rows = len(self._rows)
        uniform = self._streams[:rows].gather(1, self._draw_indices[:rows])
        greedy = np.flatnonzero(self._greedy[:rows])
        greedy_rows = torch.from_numpy(greedy).to(self._device) if len(greedy) else None
        penalties = self._sampling.penalties
        if self._occurrences is None or penalties is None:
            chosen, log_probs = sample_tokens(logits, uniform, self._sampling, greedy_rows)
        else:
            penalized = self._occurrences.penalized(logits, penalties)
            chosen, log_probs = sample_penalized(logits, penalized, uniform, self._sampling, greedy_rows)
            self._occurrences.add(chosen)
        self._chosen[:rows] = chosen
        self._draw_indices[:rows] += 1
        finished = self._record(chosen.cpu().numpy(), log_probs.cpu().numpy())
        if finished:
            self._drop()
        return finished

    def _decode(self) -> torch.Tensor:
        """Decode the last token of each row. Return the next logits [rows, vocabulary]."""
        with self._recording() as last:
            logits = self._decoder.logits(self._chosen[: len(self._rows)])
            for slot, experts in enumerate(self._recorded(last)):
                if self._alive[slot]:
                    self._experts[slot].append(experts[None])
        return logits

    def _recording(self) -> AbstractContextManager[Callable[[], torch.Tensor] | None]:
        return nullcontext() if self._routers is None else self._routers.recording()

    def _recorded(self, last: Callable[[], torch.Tensor] | None) -> ExpertArray:
        """Return the experts of the tokens of the last pass, [tokens, layers, experts per token], or no tokens."""
        if self._routers is None or last is None:
            return np.zeros((0, 0, 0), np.uint8)
        return last().cpu().numpy().astype(self._routers.dtype)

    def _record(self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> list[EngineResponse]:
        """Record the token drawn for each row. Return the responses that it finishes."""
        live, slots = np.flatnonzero(self._alive), np.arange(len(self._rows))
        if not np.isfinite(log_probs[live]).all():
            raise ComputationFailed(
                f"{type(self._model).__name__}: logits that are not finite at response token "
                f"{int(self._counts[live][~np.isfinite(log_probs[live])][0])}; "
                "the weights have diverged, or the dtype is too narrow for them (try bfloat16 or float32)"
            )
        columns = self._counts[live]
        self._token_ids[live, columns] = tokens[live]
        self._log_probs[live, columns] = log_probs[live]
        self._counts[live] += 1

        stopped = self._stops[tokens]
        if self._stop_strings is not None:
            for slot in live[self._stop_strings.candidates(tokens[live])].tolist():
                response = self._token_ids[slot, : self._counts[slot]]
                stopped[slot] = stopped[slot] or self._stop_strings.completed_by(response)
        ended = slots[self._alive & (stopped | (self._counts[slots] == self._limits[slots]))]
        finished: list[EngineResponse] = []
        for slot in sorted(ended.tolist(), key=lambda slot: self._rows[slot].id):
            count = self._counts[slot]
            ids, values = self._token_ids[slot, :count].copy(), self._log_probs[slot, :count].copy()
            experts = np.concatenate(self._experts[slot]) if self._routers is not None else None
            stop = bool(stopped[slot])
            finished.append(EngineResponse(self._rows[slot], ids, values, stopped=stop, routed_experts=experts))
        self._alive[ended] = False
        return finished

    def _join(self, requests: list[GenerationRequest]) -> torch.Tensor:
        """Add requests to the free slots. Return the logits after their prompts, [requests, vocabulary]."""
        first, limit = len(self._rows), self._sampling.max_response_tokens
        slots = slice(first, first + len(requests))
        self._rows += requests
        self._alive = np.concatenate([self._alive, np.ones(len(requests), np.bool_)])
        self._counts[slots] = 0
        self._greedy[slots] = [request.greedy for request in requests]
        self._limits[slots] = [request.own_sampling(self._sampling).max_response_tokens for request in requests]
        streams = np.stack([uniforms(self._seed, request.id, limit, request.turn) for request in requests])
        self._streams[slots] = torch.from_numpy(streams).to(self._device)
        self._draw_indices[slots] = 0
        prompts = [np.asarray(request.prompt_ids, np.int32) for request in requests]
        if self._occurrences is not None:
            self._occurrences.begin(first, prompts)
        logits = self._prefill(prompts, first)
        self._decoder.begin(slots, prompts)
        return logits

    def _prefill(self, prompts: list[NDArray[np.int32]], first: int) -> torch.Tensor:
        """Compute each distinct prompt once, right-padded to avoid a mask. Return logits [prompts, vocabulary]."""
        distinct: dict[bytes, int] = {}
        owner = [distinct.setdefault(prompt.tobytes(), len(distinct)) for prompt in prompts]
        unique = [np.frombuffer(key, np.int32) for key in distinct]
        result: torch.Tensor | None = None
        for group, columns in self._prefill_groups([len(prompt) for prompt in unique]):
            input_ids = right_pad([unique[index] for index in group], self._device, columns)
            cache = prefill_cache(self._model) if self._cached else None
            with self._recording() as recorded:
                last = self._last_logits(input_ids, [len(unique[index]) for index in group], cache)
                experts = self._recorded(recorded)
            group_rows = {index: row for row, index in enumerate(group)}
            rows = [row for row, index in enumerate(owner) if index in group_rows]
            sources = [group_rows[owner[row]] for row in rows]
            if self._routers is not None:
                of_prompts = experts.reshape(len(group), columns, *experts.shape[1:])
                for row, source in zip(rows, sources, strict=True):
                    self._experts[first + row] = [of_prompts[source, : len(prompts[row])]]
            self._decoder.fill([first + row for row in rows], sources, [len(prompts[row]) for row in rows], cache)
            if result is None:
                result = last.new_empty(len(owner), last.shape[1])
            result[rows] = last[sources]
        assert result is not None
        return result

    def _prefill_groups(self, lengths: list[int]) -> Iterator[tuple[list[int], int]]:
        """Yield the indices of prompts that are computed together, and the columns that they are padded to.

        A prompt is not padded if a layer keeps a state per sequence. For static decoding on a CPU the columns depend on the
        prompt only, because attention rounds in another way for other numbers of columns.
        """
        if not (self._unpadded or self._fixed_shapes):
            for group in micro_batches(lengths, PREFILL_TOKENS):
                yield group, max(lengths[index] for index in group)
            return
        limit = max_positions(self._model)
        padded = (
            lengths
            if self._unpadded
            else [min(_padded_columns(length), limit or _padded_columns(length)) for length in lengths]
        )
        for columns in sorted(set(padded), reverse=True):
            equal = [index for index, size in enumerate(padded) if size == columns]
            for group in micro_batches([columns] * len(equal), PREFILL_TOKENS):
                yield [equal[index] for index in group], columns

    @onednn_linear()
    def _last_logits(self, input_ids: torch.Tensor, lengths: list[int], cache: Any) -> torch.Tensor:
        """Compute prompts int64 [rows, columns] into the cache. Return the logits after each one's last token."""
        rows, columns = input_ids.shape
        last = np.arange(rows) * columns + np.asarray(lengths) - 1
        keep = np.zeros(rows * columns, np.bool_)
        keep[last] = True
        if self._fixed_shapes:
            # Further positions, so that the vocabulary projection rounds in the same way for every number of prompts.
            keep[np.flatnonzero(~keep)[: padded_rows(rows) - rows]] = True
        index = torch.from_numpy(keep.cumsum()[last] - 1).to(self._device)
        marked = torch.from_numpy(keep.reshape(rows, columns)).to(self._device)
        arguments = {} if cache is None else {cache_argument(self._model): cache}
        return logits_at_positions(self._model, input_ids, marked, use_cache=cache is not None, **arguments)[index]

    def _drop(self) -> None:
        """Remove the finished rows from the batch if they are at least ``DROP_FRACTION`` of it."""
        rows, alive = len(self._rows), int(self._alive.sum())
        if alive and rows - alive < DROP_FRACTION * rows:
            # They are decoded further, from the first column again, so that they never exceed the buffer.
            ended = np.flatnonzero(~self._alive)
            self._draw_indices[torch.from_numpy(ended).to(self._device)] = 0
            self._decoder.rest(ended)
            return
        holes = np.flatnonzero(~self._alive[:alive])
        movers = alive + np.flatnonzero(self._alive[alive:])
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        self._rows = self._rows[:alive]
        self._alive = np.ones(alive, np.bool_)
        for array in (self._greedy, self._counts, self._limits, self._token_ids, self._log_probs):
            array[holes] = array[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self._experts[hole] = self._experts[mover]
        to, source = torch.from_numpy(holes).to(self._device), torch.from_numpy(movers).to(self._device)
        for tensor in (self._chosen, self._streams, self._draw_indices):
            tensor[to] = tensor[source]
        if self._occurrences is not None:
            self._occurrences.move(to, source)
        self._decoder.keep(alive, to, source)


def _padded_columns(length: int) -> int:
    """Return the columns that a prompt of this length is padded to."""
    multiple = 16 if length <= 64 else 32 if length <= 256 else 64
    return -(-length // multiple) * multiple
