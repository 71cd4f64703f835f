"""What an update needs of memory, counted in trial forward passes, and the most tokens of a micro-batch that free memory holds.

What a pass keeps for the backward pass grows with its tokens, and, where attention keeps a score for each pair of them, with the
longest sequence, too. Three small passes tell the parts from one another. Nothing is learned, and no random number drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quartet.errors import ModelError
from quartet.models.forward.batching import MicroBatch, build_micro_batch
from quartet.models.forward.log_probs import EntropyUse, forward_log_probs, logit_chunk_tokens
from quartet.models.forward.model_capabilities import device_of, vocabulary_size
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import forward_values
from quartet.models.training.activation_checkpointing import activation_checkpointing, count_checkpointed_layers
from quartet.types import TokenBatch

MEMORY_FRACTION = 0.8
"""Of the free memory, for what is counted here: the rest is for the backward pass's own gradients, and for fragments."""
LOGIT_COPIES = 5
"""Of the logits that are made at a time, in float32, beside those that are kept: scaled, as probabilities, as gradients."""
LONG_TRIAL_TOKENS, SHORT_TRIAL_TOKENS, SHORT_TRIAL_SEQUENCES = 40, 24, 3
"""Tokens of a trial's sequences, one long and some short: packed, attention spreads them out nearly as far as it may."""

Forward = Callable[[MicroBatch], Any]


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes kept for the backward pass: constant, of each token, and of each pair of a token and one of the longest sequence."""

    constant: float
    token: float
    pair: float

    def bytes(self, tokens: int, longest: int) -> float:
        """Of a micro-batch with so many tokens."""
        return self.constant + tokens * self.slope(longest)

    def slope(self, longest: int) -> float:
        """Of one more token."""
        return self.token + self.pair * longest


def saved_bytes(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes that ``forward`` keeps for its backward pass: each storage once, and none of the model's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    results: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            results[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(results.values())


def activations_saved_by(model: Any, forward: Forward, longest: int) -> SavedActivations:
    """Return what ``forward`` keeps of a micro-batch, from three of sequences of at most ``longest`` tokens."""
    long = max(1, min(LONG_TRIAL_TOKENS, longest // 2))
    lengths = (
        [long, *[max(1, long * SHORT_TRIAL_TOKENS // LONG_TRIAL_TOKENS)] * SHORT_TRIAL_SEQUENCES]
        if supports_packing(model)
        else [long, long]
    )

    def trial(times: int, factor: int) -> tuple[int, int]:
        micro_batch = _trial_batch(model, lengths * times, factor)
        return saved_bytes(model, lambda: forward(micro_batch)), micro_batch.input_ids.numel()

    (once, tokens), (twice, _), (longer, _) = trial(1, 1), trial(2, 1), trial(1, 2)
    # Both have twice the tokens; the second has sequences twice as long, too.
    pair = max(0.0, (longer - twice) / (2 * tokens * long))
    token = max(0.0, (twice - once) / tokens - pair * long)
    return SavedActivations(max(0.0, once - tokens * (token + pair * long)), token, pair)


def _trial_batch(model: Any, lengths: list[int], factor: int) -> MicroBatch:
    """Sequences of ``factor`` times ``lengths`` tokens, each of which predicts one of the response; the last predicts none."""
    sizes = factor * np.array(lengths, np.int32)
    ones = np.ones_like(sizes)
    token_ids = (np.arange(sizes.sum() + len(sizes)) % vocabulary_size(model)).astype(np.int32)
    batch = TokenBatch(token_ids, ones, sizes)
    return build_micro_batch(batch, range(len(sizes)), device_of(model), supports_packing(model))


@dataclass(frozen=True, slots=True)
class Activations:
    """``whole``: with the logits of all tokens. ``parts``: with those of ``rows`` tokens at a time, where there are more.

    ``logits``: bytes of a token's logits in float32, 0 for a model without.
    """

    whole: SavedActivations
    parts: SavedActivations
    rows: int
    logits: int

    def bytes(self, tokens: int, longest: int) -> float:
        """Most that a micro-batch with so many tokens needs."""
        passing = LOGIT_COPIES * self.logits * min(tokens, self.rows)
        if tokens <= self.rows:
            return self.whole.bytes(tokens, longest) + passing
        # Those of one part are kept while the part is on its way back.
        again = self.rows * max(0.0, self.whole.slope(longest) - self.parts.slope(longest))
        return self.parts.bytes(tokens, longest) + again + passing


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """What an update needs: bytes of ``state`` (gradients, optimizer), and of the activations.

    ``with_checkpointing``: activations with gradient checkpointing, None if the model does not support it. ``longest``: tokens
    of the longest sequence, which may be alone in a micro-batch.
    """

    state: int
    plain: Activations
    with_checkpointing: Activations | None
    longest: int

    def bytes(self, tokens: int, recomputes: bool) -> float:
        """For micro-batches of at most so many tokens."""
        result = self.with_checkpointing if recomputes and self.with_checkpointing is not None else self.plain
        return self.state + result.bytes(max(tokens, self.longest), self.longest)

    def token_bytes(self, recomputes: bool) -> int:
        """Of activations for each token, in the longest sequence."""
        result = self.with_checkpointing if recomputes and self.with_checkpointing is not None else self.plain
        return round(result.bytes(self.longest, self.longest) / self.longest)

    def most_tokens(self, at_most: int, free: float, recomputes: bool) -> int:
        """Most tokens that ``free`` bytes hold: ``at_most``, or a half, a quarter, ...; 0 where none do."""
        tokens = at_most
        while tokens and self.bytes(tokens, recomputes) > MEMORY_FRACTION * free:
            # A longer sequence would be alone in any of them.
            tokens = tokens // 2 if tokens > self.longest else 0
        return tokens


def policy_forward(model: Any, entropy_use: EntropyUse, whole: bool) -> Forward:
    """The policy update's forward pass, with the logits of all tokens or of a few at a time."""
    return lambda micro_batch: forward_log_probs(
        model, micro_batch, 1.0, entropy_use, len(micro_batch) if whole else SHORT_TRIAL_SEQUENCES
    )


def measure_policy(model: Any, longest: int, entropy_use: EntropyUse) -> UpdateMemory:
    """Return what updates of the policy need, with sequences of at most ``longest`` tokens."""
    logits, rows = 4 * vocabulary_size(model), logit_chunk_tokens(model)

    def activations() -> Activations:
        whole, parts = (
            activations_saved_by(model, policy_forward(model, entropy_use, of_all), longest) for of_all in (True, False)
        )
        return Activations(whole, parts, rows, logits)

    return _measure(model, longest, activations)


def measure_value(value_model: Any, longest: int) -> UpdateMemory:
    """Return what updates of the value model need, with sequences of at most ``longest`` tokens."""

    def activations() -> Activations:
        result = activations_saved_by(
            value_model, lambda micro_batch: forward_values(value_model, micro_batch), longest
        )
        return Activations(result, result, 0, 0)

    return _measure(value_model, longest, activations)


def _measure(model: Any, longest: int, activations: Callable[[], Activations]) -> UpdateMemory:
    layers, with_checkpointing = count_checkpointed_layers(model), None
    try:
        plain = activations()
        with activation_checkpointing(model, layers > 0):
            again = activations()
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{type(model).__name__}: a trial of a few tokens found no room on {device_of(model)}: {error}; leave this service "
            "more memory, or give it a device of its own"
        ) from None
    if layers:
        with_checkpointing = Activations(
            _with_one_layer(again.whole, plain.whole, layers),
            _with_one_layer(again.parts, plain.parts, layers),
            plain.rows,
            plain.logits,
        )
    return UpdateMemory(_state_bytes(model), plain, with_checkpointing, longest)


def _with_one_layer(with_checkpointing: SavedActivations, plain: SavedActivations, layers: int) -> SavedActivations:
    """On the way back there is one layer at a time as if nothing was computed again."""

    def both(few: float, all_layers: float) -> float:
        return few + max(0.0, all_layers - few) / layers

    return SavedActivations(
        both(with_checkpointing.constant, plain.constant),
        both(with_checkpointing.token, plain.token),
        both(with_checkpointing.pair, plain.pair),
    )


def _state_bytes(model: Any) -> int:
    """Of gradients and AdamW's two moments: before the first update there are none. Masters are there from the start."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The step's float32 gradients of half precision are a fifth more, when no activations are kept: within what SHARE leaves.
    return sum(int(parameter.nbytes) + 2 * 4 * parameter.numel() for parameter in learning)


def free_gpu_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what the allocator holds for this process without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
