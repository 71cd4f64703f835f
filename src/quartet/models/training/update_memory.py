"""Memory of an update, measured in trial forward passes, and the largest micro-batch that fits into free memory.

The bytes saved for the backward pass grow with the tokens. If attention saves a score per pair of tokens, they also grow with the
longest sequence. Three small passes separate these parts. The trials do not change weights or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quartet.contract.trajectory import TokenBatch
from quartet.errors import ModelError
from quartet.model_files.memory import LOGIT_COPIES, MEMORY_FRACTION, training_state
from quartet.models.forward.batching import MicroBatch, build_micro_batch
from quartet.models.forward.log_probs import EntropyUse, forward_log_probs, logit_chunk_tokens
from quartet.models.forward.lora_dropout import dropout, masks_of
from quartet.models.forward.model_capabilities import device_of, vocabulary_size
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import forward_values
from quartet.models.training.activation_checkpointing import activation_checkpointing, count_checkpointed_layers
from quartet.models.workers.workers import SINGLE, Workers, local_tensor

LONG_TRIAL_TOKENS, SHORT_TRIAL_TOKENS, SHORT_TRIAL_SEQUENCES = 40, 24, 3
"""Tokens of the trial sequences, one long and some short. Packed, they nearly reach the maximum padding in attention."""

Forward = Callable[[MicroBatch], Any]


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes saved for the backward pass: constant, per token, and per pair of a token and a token of the longest sequence."""

    constant: float
    token: float
    pair: float

    def bytes(self, tokens: int, longest: int) -> float:
        """Return the bytes saved for a micro-batch with ``tokens`` tokens."""
        return self.constant + tokens * self.slope(longest)

    def slope(self, longest: int) -> float:
        """Return the bytes saved per additional token."""
        return self.token + self.pair * longest


def saved_bytes(model: Any, forward: Callable[[], Any], workers: Workers = SINGLE) -> int:
    """Return the bytes that ``forward`` saves for its backward pass. Each storage counts once, the model's weights do not."""
    # The tables of the modules: a group replaces the tensors in them, and to search all modules again takes long.
    held = [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]
    own = _storages(held)
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # A group gathers the weights of a layer for its computation, so they have a new address in each layer.
        if address not in own and address not in sizes and (workers.size == 1 or address not in _storages(held)):
            sizes[address] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = workers.forward(forward)
    del output
    workers.end_trial()
    return sum(sizes.values())


def _storages(held: Iterable[Mapping[str, torch.Tensor | None]]) -> set[int]:
    return {
        local_tensor(tensor).untyped_storage().data_ptr()
        for tensors in held
        for tensor in tensors.values()
        if tensor is not None
    }


def activations_saved_by(model: Any, forward: Forward, longest: int, workers: Workers = SINGLE) -> SavedActivations:
    """Measure what ``forward`` saves, in three micro-batches of sequences of at most ``longest`` tokens."""
    long = max(1, min(LONG_TRIAL_TOKENS, longest // 2))
    lengths = (
        [long, *[max(1, long * SHORT_TRIAL_TOKENS // LONG_TRIAL_TOKENS)] * SHORT_TRIAL_SEQUENCES]
        if supports_packing(model)
        else [long, long]
    )

    def trial(times: int, factor: int) -> tuple[int, int]:
        micro_batch = trial_batch(model, lengths * times, factor)
        with dropout(masks_of(model), ("trial",), micro_batch):
            saved = saved_bytes(model, lambda: forward(micro_batch), workers)
        return saved, micro_batch.input_ids.numel()

    (once, tokens), (twice, _), (longer, _) = trial(1, 1), trial(2, 1), trial(1, 2)
    # Both have twice the tokens of the first. ``longer`` also has sequences twice as long.
    pair = max(0.0, (longer - twice) / (2 * tokens * long))
    token = max(0.0, (twice - once) / tokens - pair * long)
    return SavedActivations(max(0.0, once - tokens * (token + pair * long)), token, pair)


def trial_batch(model: Any, lengths: list[int], factor: int = 1) -> MicroBatch:
    """Build a micro-batch of sequences of ``factor`` times ``lengths`` input tokens, each of which predicts a response token."""
    sizes = factor * np.array(lengths, np.int32)
    ones = np.ones_like(sizes)
    token_ids = (np.arange(sizes.sum() + len(sizes)) % vocabulary_size(model)).astype(np.int32)
    batch = TokenBatch(token_ids, ones, sizes)
    return build_micro_batch(batch, range(len(sizes)), device_of(model), supports_packing(model))


@dataclass(frozen=True, slots=True)
class Activations:
    """Saved activations with all logits at once, or with the logits of ``rows`` tokens at a time.

    A micro-batch of more than ``rows`` tokens uses ``chunked_logits``.
    ``logits``: bytes of one token's logits in float32, 0 for a model without logits.
    """

    all_logits: SavedActivations
    chunked_logits: SavedActivations
    rows: int
    logits: int

    def bytes(self, tokens: int, longest: int) -> float:
        """Return the peak bytes of a micro-batch with ``tokens`` tokens."""
        temporary = LOGIT_COPIES * self.logits * min(tokens, self.rows)
        if tokens <= self.rows:
            return self.all_logits.bytes(tokens, longest) + temporary
        # The backward pass recomputes one chunk at a time and holds only its activations.
        recomputed = self.rows * max(0.0, self.all_logits.slope(longest) - self.chunked_logits.slope(longest))
        return self.chunked_logits.bytes(tokens, longest) + recomputed + temporary


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Memory that an update needs: bytes of ``state`` (gradients, optimizer), and the activations.

    ``with_checkpointing``: activations with activation checkpointing, None if the model does not support it. ``longest``: tokens
    of the longest sequence. A micro-batch may consist of it only.
    """

    state: int
    plain: Activations
    with_checkpointing: Activations | None
    longest: int

    def bytes(self, tokens: int, recomputes: bool) -> float:
        """Return the bytes for micro-batches of at most ``tokens`` tokens."""
        result = self.with_checkpointing if recomputes and self.with_checkpointing is not None else self.plain
        return self.state + result.bytes(max(tokens, self.longest), self.longest)

    def token_bytes(self, recomputes: bool) -> int:
        """Return the bytes of activations per token in the longest sequence."""
        result = self.with_checkpointing if recomputes and self.with_checkpointing is not None else self.plain
        return round(result.bytes(self.longest, self.longest) / self.longest)

    def max_tokens_within(self, at_most: int, free: float, recomputes: bool) -> int:
        """Return the number of tokens that fit into ``free`` bytes: ``at_most``, half of it, a quarter, ...; 0 if none fit."""
        tokens = at_most
        while tokens and self.bytes(tokens, recomputes) > MEMORY_FRACTION * free:
            # A smaller limit than the longest sequence saves nothing, because that sequence gets a micro-batch anyway.
            tokens = tokens // 2 if tokens > self.longest else 0
        return tokens


def policy_forward(model: Any, entropy_use: EntropyUse, all_at_once: bool) -> Forward:
    """Return the policy update's forward pass, with the logits of all tokens at once or in small chunks."""
    return lambda micro_batch: forward_log_probs(
        model, micro_batch, 1.0, entropy_use, len(micro_batch) if all_at_once else SHORT_TRIAL_SEQUENCES
    )


def measure_policy(
    model: Any, longest: int, entropy_use: EntropyUse, workers: Workers = SINGLE, offload: bool = False
) -> UpdateMemory:
    """Measure the memory of policy updates with sequences of at most ``longest`` tokens. All ``workers`` must call it.

    ``offload``: the moments of the optimizer are in host memory.
    """
    logits, rows = 4 * vocabulary_size(model), logit_chunk_tokens(model)

    def activations() -> Activations:
        all_logits, chunked_logits = (
            activations_saved_by(model, policy_forward(model, entropy_use, of_all), longest, workers)
            for of_all in (True, False)
        )
        return Activations(all_logits, chunked_logits, rows, logits)

    return _measure(model, longest, activations, workers, offload)


def measure_value(value_model: Any, longest: int, workers: Workers = SINGLE, offload: bool = False) -> UpdateMemory:
    """Measure the memory of value model updates with sequences of at most ``longest`` tokens. See ``measure_policy``."""

    def activations() -> Activations:
        result = activations_saved_by(
            value_model, lambda micro_batch: forward_values(value_model, micro_batch), longest, workers
        )
        return Activations(result, result, 0, 0)

    return _measure(value_model, longest, activations, workers, offload)


def _measure(
    model: Any, longest: int, activations: Callable[[], Activations], workers: Workers, offload: bool
) -> UpdateMemory:
    layers, with_checkpointing = count_checkpointed_layers(model), None
    try:
        plain = activations()
        with activation_checkpointing(model, layers > 0):
            checkpointed = activations()
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{type(model).__name__}: out of memory in a trial of a few tokens on {device_of(model)}: {error}; free memory for "
            "this service, or give it a separate device"
        ) from None
    if layers:
        with_checkpointing = Activations(
            _with_one_layer(checkpointed.all_logits, plain.all_logits, layers),
            _with_one_layer(checkpointed.chunked_logits, plain.chunked_logits, layers),
            plain.rows,
            plain.logits,
        )
    # All ranks must choose the same micro-batches, and the first may have one row more than the others.
    state = -workers.smallest(-_state_bytes(model, offload)) + workers.gathered_bytes()
    return UpdateMemory(state, plain, with_checkpointing, longest)


def _with_one_layer(with_checkpointing: SavedActivations, plain: SavedActivations, layers: int) -> SavedActivations:
    """Add the activations of one layer, which the backward pass recomputes one at a time."""

    def both(few: float, all_layers: float) -> float:
        return few + max(0.0, all_layers - few) / layers

    return SavedActivations(
        both(with_checkpointing.constant, plain.constant),
        both(with_checkpointing.token, plain.token),
        both(with_checkpointing.pair, plain.pair),
    )


def _state_bytes(model: Any, offload: bool) -> int:
    """Return the bytes of gradients and AdamW's two moments, which the first update allocates. Master weights exist already.

    On a GPU all gradients are float32, see MasterWeightAdamW, and the step needs no temporary memory. With ``offload``, the
    moments of one parameter at a time are there. What is in host memory does not count there.
    """
    device = device_of(model)
    states = [
        training_state(part.numel(), part.numel(), part.itemsize)
        for parameter in model.parameters()
        for part in (local_tensor(parameter),)
        if parameter.requires_grad and (device.type == "cpu" or part.device.type == "cuda")
    ]
    on_gpu = device.type == "cuda"
    if on_gpu:
        states = [state.without_temporary_gradients() for state in states]
    moments = [state.moments for state in states]
    needed = sum(state.gradients for state in states)
    needed += max(moments, default=0) if offload and on_gpu else sum(moments)
    # On a CPU, the float32 gradients of a step in half precision add a fifth, at a time without activations: 1 - MEMORY_FRACTION
    # covers it.
    return int(needed)


def free_gpu_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including unused memory that this process's allocator holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def total_gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, used or not."""
    return int(torch.cuda.mem_get_info(device)[1])
