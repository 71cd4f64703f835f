"""Generation in torch: batched decoding with a key-value cache, from which finished rows leave.

Prompts that are equal are computed once. A row's draws come from its own random stream, so which rows share a batch decides
none of them. (It does decide the last bits of the logits, as matrix products round by shape: the same requests give the same
bits.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.errors import Cancelled, ComputationFailed, InvalidRequest, ModelError
from quartet.models.batching import micro_batches, right_pad
from quartet.models.forward import check_lengths, device_of, logits_at, takes, vocabulary_size
from quartet.models.kv_cache import DecodeCache, check_cacheable, prefill_cache
from quartet.models.sampling import check_sampling, draw
from quartet.random_streams import uniforms
from quartet.types import FinishReason, GenerationRequest, SamplingParameters, Trajectory

PREFILL_TOKENS = 8192
"""The most prompt tokens, pads included, in one forward pass."""

DROP_FRACTION = 1 / 8
"""Finished rows are dropped when they are at least this part of the batch; until then they decode unseen."""


class TorchEngine:
    """Generates with a transformers causal LM in this process.

    ``stop_ids`` end a response. ``max_concurrent`` bounds the rows decoded at once, and so the cache's memory. Not for use by two
    threads at once. Raises ModelError for a model whose state is more than keys and values.
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise InvalidRequest(f"max_concurrent {max_concurrent}: expected at least 1")
        if not takes(model, "past_key_values"):
            raise ModelError(f"{type(model).__name__}: expected a causal language model with a key-value cache")
        check_cacheable(model)
        self._model = model
        self._stop_ids = stop_ids
        self._max_concurrent = max_concurrent

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Trajectory]:
        """The trajectories, each as soon as it is finished: by token, and within one token by id.

        ``log_probs`` are of the sampled tokens at the sampling temperature (1 when greedy), of the whole distribution even where
        top_k or top_p truncated it, so that they are the ones the trainer computes. Raises InvalidRequest at the call; while
        iterating, Cancelled (``cancelled`` is asked before every token) and ComputationFailed (logits that are not finite).
        """
        check_sampling(sampling)
        for request in requests:
            self._check(request, sampling)
        ordered = sorted(requests, key=lambda request: request.id)
        return self._generate(ordered, sampling, seed, policy_version, cancelled)

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool],
    ) -> Iterator[Trajectory]:
        for start in range(0, len(requests), self._max_concurrent):
            members = requests[start : start + self._max_concurrent]
            stop_ids = frozenset[int]() if sampling.ignore_eos else self._stop_ids
            wave = _Wave(self._model, stop_ids, members, sampling, seed)
            while wave.active:
                if cancelled():
                    raise Cancelled("generation was cancelled by its caller")
                for index, response_ids, log_probs, reason in wave.step():
                    request = members[index]
                    prompt_ids = np.asarray(request.prompt_ids, np.int32)
                    yield Trajectory(request.id, policy_version, prompt_ids, response_ids, log_probs, reason)

    def _check(self, request: GenerationRequest, sampling: SamplingParameters) -> None:
        prompt, size = request.prompt_ids, vocabulary_size(self._model)
        if prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt of {request.id}: expected at least one token id in one dimension")
        if int(prompt.min()) < 0 or int(prompt.max()) >= size:
            raise InvalidRequest(f"prompt of {request.id}: a token id outside the vocabulary 0..{size - 1}")
        check_lengths(self._model, np.array([len(prompt) + sampling.max_response_tokens], np.int64))


Finished = tuple[int, NDArray[np.int32], NDArray[np.float32], FinishReason]


class _Wave:
    """The rows decoded together, from their prompts to their last tokens.

    A slot is a place in the batch; ``_member`` says whose it is. The first slots are in use; when rows finish and are dropped,
    rows from the last slots move into theirs.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        members: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
    ) -> None:
        self._model, self._sampling, self._device = model, sampling, device_of(model)
        self._stops = np.zeros(vocabulary_size(model), np.bool_)
        self._stops[[index for index in stop_ids if index < len(self._stops)]] = True
        rows, limit = len(members), sampling.max_response_tokens

        self._prompts = [np.asarray(member.prompt_ids, np.int32) for member in members]
        self._lengths = np.array([len(prompt) for prompt in self._prompts])
        self._columns = int(self._lengths.max())
        self._member = np.arange(rows)
        self._alive = np.ones(rows, np.bool_)
        self._count = 0
        self._token_ids = np.zeros((rows, limit), np.int32)
        self._log_probs = np.zeros((rows, limit), np.float32)
        streams = np.stack([uniforms(seed, member.id, limit) for member in members])
        self._begin(torch.from_numpy(streams))

    @property
    def active(self) -> bool:
        """Whether any row still has tokens to come."""
        return bool(self._alive.any())

    @torch.inference_mode()
    def _begin(self, streams: torch.Tensor) -> None:
        rows = len(self._member)
        self._streams = streams.to(self._device)
        # Rounded up, as fast attention kernels on GPUs want masks whose rows start at multiples of 16 bytes.
        capacity = -(-(self._columns + self._sampling.max_response_tokens) // 8) * 8
        self._cache = DecodeCache(rows, self._columns, capacity)
        self._padding = _Padding(self._model, self._lengths, self._columns, capacity, self._device)
        # A copy: these count up in place, the lengths stay.
        self._positions = torch.tensor(self._lengths[:, None], device=self._device)
        self._logits: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Draws every row's next token. Gives the rows that are finished with it, by index."""
        slots = len(self._member)
        logits = self._prefill() if self._chosen is None else self._decode(self._chosen)
        place = self._count
        chosen, log_probs = draw(logits, self._streams[:slots, place : place + 1], self._sampling)
        tokens, found = chosen.cpu().numpy(), log_probs.cpu().numpy()
        if not np.isfinite(found).all():
            raise ComputationFailed(
                f"{type(self._model).__name__}: logits that are not finite at response token {place}; "
                "the weights have diverged, or the dtype is too narrow for them (try bfloat16 or float32)"
            )
        self._token_ids[self._member, place] = tokens
        self._log_probs[self._member, place] = found
        self._count += 1

        stopped = self._stops[tokens]
        ended = self._alive & (stopped if self._count < self._token_ids.shape[1] else True)
        finished: list[Finished] = []
        if ended.any():
            for slot in sorted(np.flatnonzero(ended), key=lambda slot: int(self._member[slot])):
                reason = FinishReason.EOS if stopped[slot] else FinishReason.LENGTH
                index = int(self._member[slot])
                ids, values = self._token_ids[index, : self._count], self._log_probs[index, : self._count]
                finished.append((index, ids.copy(), values.copy(), reason))
            self._alive &= ~ended
            chosen = self._drop(chosen)
        self._chosen = chosen
        return finished

    def _prefill(self) -> torch.Tensor:
        """Computes each distinct prompt once, right-padded (no mask, so the fast causal path). Logits [rows, vocabulary]."""
        distinct: dict[bytes, int] = {}
        owner = [distinct.setdefault(prompt.tobytes(), len(distinct)) for prompt in self._prompts]
        prompts = [np.frombuffer(key, np.int32) for key in distinct]
        lengths = [len(prompt) for prompt in prompts]
        logits: torch.Tensor | None = None
        for group in micro_batches(lengths, PREFILL_TOKENS):
            input_ids = right_pad([prompts[index] for index in group], self._device)
            keep = torch.zeros_like(input_ids, dtype=torch.bool)
            keep[torch.arange(len(group)), torch.tensor([lengths[index] - 1 for index in group])] = True
            cache = prefill_cache()
            last = logits_at(self._model, input_ids, keep, past_key_values=cache, use_cache=True)
            place = {index: row for row, index in enumerate(group)}
            rows = [row for row, index in enumerate(owner) if index in place]
            sources = [place[owner[row]] for row in rows]
            self._cache.fill(rows, sources, [int(self._lengths[row]) for row in rows], cache)
            if logits is None:
                logits = last.new_empty(len(owner), last.shape[1])
            logits[rows] = last[sources]
        assert logits is not None
        return logits

    def _decode(self, chosen: torch.Tensor) -> torch.Tensor:
        """One token for every row: ids [rows] -> logits [rows, vocabulary]."""
        slots = len(self._member)
        start, end = self._cache.window
        arguments: dict[str, Any] = self._padding.arguments(slots, start, end + 1)
        if takes(self._model, "position_ids"):
            arguments["position_ids"] = self._positions[:slots]
        logits: torch.Tensor = self._model(
            input_ids=chosen[:, None], past_key_values=self._cache.layers, use_cache=True, **arguments
        ).logits
        self._cache.advance()
        self._positions += 1
        return logits[:, -1]

    def _drop(self, chosen: torch.Tensor) -> torch.Tensor:
        """Removes the finished rows from the batch if they are many enough. Gives ``chosen`` of the slots left."""
        alive = int(self._alive.sum())
        if alive == 0 or len(self._alive) - alive < DROP_FRACTION * len(self._alive):
            return chosen
        holes = np.flatnonzero(~self._alive[:alive])
        movers = alive + np.flatnonzero(self._alive[alive:])
        self._member[holes] = self._member[movers]
        self._member = self._member[:alive]
        self._alive = np.ones(alive, np.bool_)
        start = self._columns - int(self._lengths[self._member].max())
        to, source = torch.from_numpy(holes).to(self._device), torch.from_numpy(movers).to(self._device)
        for tensor in (chosen, self._streams, self._positions, *self._padding.per_slot):
            tensor[to] = tensor[source]
        self._padding.least = self._columns - int(self._lengths[self._member].min())
        self._cache.keep(alive, to, source, start)
        return chosen[:alive]


class _Padding:
    """Hides the columns left of the shorter prompts from attention, as cheaply as the model allows."""

    def __init__(
        self, model: Any, lengths: NDArray[np.int64], columns: int, capacity: int, device: torch.device
    ) -> None:
        self.least = columns - int(lengths.min())
        """The first column that no row has as padding."""
        pads = torch.from_numpy(columns - lengths).to(device)[:, None]
        real = torch.arange(capacity, device=device) >= pads
        self._additive = _takes_additive_mask(model)
        self._mask = real.long()
        if self._additive:
            dtype = model.get_input_embeddings().weight.dtype
            # Half of the least number: adding a score to the least itself can overflow in half precision.
            hidden = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
            self._mask = torch.where(real, torch.zeros_like(hidden), hidden)[:, None, None, :]

    @property
    def per_slot(self) -> list[torch.Tensor]:
        """The tensors that have a row per slot."""
        return [self._mask]

    def arguments(self, slots: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """The mask for columns [start, stop), or nothing when no row has padding among them."""
        if self.least <= start:
            return {}
        return {"attention_mask": self._mask[:slots, ..., start:stop]}


def _takes_additive_mask(model: Any) -> bool:
    """Whether a ready-made mask [rows, 1, 1, columns] means the same to every layer of the model.

    Then none has to be built from the padding at every token. Not for sliding windows (each kind of layer has its own mask) and
    not for models that count positions from the padding mask (ALiBi).
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    whole = set(kinds) == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None
    plain = getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
    return whole and plain and takes(model, "position_ids")
