"""Packing of sequences of different lengths: all tokens in one row without pads, and attention within each sequence.

Everything except attention computes token by token, so the model gets one long row. Attention unpacks it into one row per
sequence, computes causal attention, and packs the outputs again. Neighbours of similar length are computed together as a block.
A prompt that several sequences share is stored in the row once. On a GPU in half precision, one kernel computes the packed row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface

from quartet.errors import ModelError
from quartet.models.forward.gpu_attention import Runs, attend_to_runs, can_attend_to_runs, sdpa
from quartet.models.forward.model_capabilities import (
    accepts_argument,
    attends_to_all,
    attention_implementation,
    backbone,
    device_of,
    vocabulary_size,
)

MIN_LENGTH_RATIO = 0.6
"""Sequences share a block if the shortest has at least this fraction of the longest one's tokens."""
ATTENTION_NAME = "quartet_packed"
"""Name of this module's attention in transformers' registry."""
TokenIndices = NDArray[np.int64]
"""Indices of a sequence's tokens in the packed row, int64 [tokens], ascending."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Maximum difference between packed and padded hidden states, relative to the largest hidden state."""
_packing_checks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Packing:
    """Mapping between a packed row of tokens and the unpacked blocks that attention computes.

    ``position_ids`` int64 [1, tokens]: from 0 in each sequence. ``blocks``: (rows, longest) of the sequences that attention
    computes together. The unpacked blocks are concatenated, each with rows x longest tokens. ``sources`` int64 [unpacked tokens]:
    index in the row of each unpacked token, arbitrary for pads. ``token_indices`` int64 [tokens]: index of each token of the row
    among the unpacked tokens, in the first sequence that contains it. ``runs``: on a GPU, the same without indices.
    """

    position_ids: torch.Tensor
    blocks: tuple[tuple[int, int], ...]
    sources: torch.Tensor
    token_indices: torch.Tensor
    runs: Runs | None = None

    @classmethod
    def of(cls, sequences: Sequence[TokenIndices], device: torch.device | str) -> Packing:
        """Create the packing of sequences, each given by the indices of its tokens in the row.

        New tokens of a sequence must come after all tokens of the sequences before it. Sequences in descending order of length
        give the fewest blocks.
        """
        positions = np.zeros((1, 1 + max(int(sequence[-1]) for sequence in sequences)), np.int64)
        blocks, sources, token_indices = list[tuple[int, int]](), list[TokenIndices](), list[TokenIndices]()
        padded_lengths = list[int]()
        seen = start = 0
        for together in _group_by_length(sequences):
            longest = max(map(len, together))
            blocks.append((len(together), longest))
            padded_lengths += [longest] * len(together)
            for sequence in together:
                positions[0, sequence] = np.arange(len(sequence))
                token_indices.append(start + np.flatnonzero(sequence >= seen))
                start += longest
                # Positions after the end of a sequence are masked by causal attention, and their outputs are not read.
                sources.append(np.pad(sequence, (0, longest - len(sequence))))
                seen = max(seen, 1 + int(sequence[-1]))
        flat = (positions, np.concatenate(sources), np.concatenate(token_indices))
        position_ids, source_indices, indices = (torch.from_numpy(array).to(device) for array in flat)
        runs = Runs.of(sequences, padded_lengths, device) if torch.device(device).type == "cuda" else None
        return cls(position_ids, tuple(blocks), source_indices, indices, runs)


def _group_by_length(sequences: Sequence[TokenIndices]) -> list[list[TokenIndices]]:
    """Return the sequences grouped into blocks."""
    results: list[list[TokenIndices]] = []
    shortest = longest = 0
    for sequence in sequences:
        shortest, longest = min(shortest, len(sequence)), max(longest, len(sequence))
        if shortest < MIN_LENGTH_RATIO * longest:
            shortest = longest = len(sequence)
            results.append([])
        results[-1].append(sequence)
    return results


@contextmanager
def packed_attention(model: Any, packing: Packing | None) -> Iterator[dict[str, Any]]:
    """Make the model attend within packed sequences inside the context. Yield further arguments of its forward pass.

    Without a packing, the context changes nothing and yields no arguments.
    """
    if packing is None:
        yield {}
        return
    with attention_implementation(model, ATTENTION_NAME):
        yield {"position_ids": packing.position_ids, "packing": packing}


def logits_at_positions(
    model: nn.Module, input_ids: torch.Tensor, keep: torch.Tensor, packing: Packing | None = None, **arguments: Any
) -> torch.Tensor:
    """Return the logits at the positions ``keep``: [n, vocabulary].

    ``keep`` is int64 [n], positions in a row [1, tokens] with a ``packing``; or bool of the shape of ``input_ids``
    [rows, longest], read row by row. ``arguments`` go to the model. The vocabulary projection is computed for these positions
    only; for small models it is the larger part of the work.
    """
    # If all positions are kept, nothing is saved, and the shape of the logits would not show whether the model applied ``keep``.
    some = packing is None or len(keep) != input_ids.shape[1]
    if some and accepts_argument(model, "logits_to_keep"):
        arguments["logits_to_keep"] = keep
    with packed_attention(model, packing) as more:
        logits: torch.Tensor = model(input_ids=input_ids, **arguments, **more).logits
    if packing is not None and some and logits.shape[1] == len(keep):
        # Not [0], because its gradient is a copy into a tensor of zeros.
        return logits.squeeze(0)
    # A model without this argument, or with another form of it, returns logits for every position.
    return logits if logits.ndim == 2 else select_positions(logits, keep)


def select_positions(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return ``states`` [rows, longest, size], or [1, tokens, size], at the positions ``keep``: [n, size].

    ``keep``: see ``logits_at_positions``.
    """
    return states[keep] if keep.dtype == torch.bool else states.squeeze(0).index_select(0, keep)


def hidden_states(backbone: Any, input_ids: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
    """Return the last layer's hidden states, [rows, longest, hidden], or [1, tokens, hidden] with a ``packing``."""
    with packed_attention(backbone, packing) as more:
        hidden: torch.Tensor = backbone(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


def supports_packing(model: Any) -> bool:
    """Return whether a model or value model computes the same for packed and padded sequences. Each model is tried once.

    Raises ModelError if it does not compute the same for padded sequences and for each one alone.
    """
    base = backbone(model)
    if base not in _packing_checks:
        padded = _padded_states(base)
        _packing_checks[base] = _is_candidate(base) and _matches_packed(base, padded)
    return _packing_checks[base]


def _is_candidate(base: Any) -> bool:
    return (
        attends_to_all(base) and base.config._attn_implementation == "sdpa" and accepts_argument(base, "position_ids")
    )


# The first two sequences share a block and two tokens; the last is in another block.
_TRIAL = ([0, 1, 2, 3, 4], [0, 1, 5, 6], [7, 8])


@torch.no_grad()
def _padded_states(base: Any) -> torch.Tensor:
    """Return the hidden states of the trial's tokens, each once, [9, hidden], from a batch with pads on the right.

    Raises ModelError if they differ from those of each sequence alone.
    """
    ids = torch.arange(9, device=device_of(base)) % vocabulary_size(base)
    padded = hidden_states(base, torch.stack([ids[row + [0] * (5 - len(row))] for row in _TRIAL]))
    alone = [hidden_states(base, ids[row][None])[0] for row in _TRIAL]
    differences = torch.cat(
        [
            (states[: len(expected)] - expected).abs().amax(-1) / expected.abs().max()
            for states, expected in list(zip(padded, alone, strict=True))[1:]  # Those with pads.
        ]
    )
    # In half precision the median, because a token may get other experts.
    difference = float(differences.max() if padded.dtype == torch.float32 else differences.float().median())
    # This also refuses a difference of NaN.
    if not difference <= TOLERANCE[padded.dtype]:
        raise ModelError(
            f"{type(base).__name__}: the hidden states of a sequence differ by {difference:.2g} of the largest from those in a "
            "batch with pads after it; give a model whose tokens attend to no later tokens"
        )
    return padded.flatten(0, 1)[[0, 1, 2, 3, 4, 7, 8, 10, 11]]


@torch.no_grad()
def _matches_packed(base: Any, expected: torch.Tensor) -> bool:
    device = device_of(base)
    ids = torch.arange(9, device=device) % vocabulary_size(base)
    packing = Packing.of([np.array(row) for row in _TRIAL], device)
    try:
        result = hidden_states(base, ids[None], packing)[0]
    except (KeyError, TypeError, ValueError):
        # The model does not pass the packing on to its attention.
        return False
    difference = (result - expected).abs().max() / expected.abs().max()
    return bool(difference <= TOLERANCE[expected.dtype])


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within sequences: query, key and value [1, heads, tokens, head size] -> [1, tokens, heads, head size].

    The signature is that of attention functions in transformers.
    """
    packing: Packing = arguments.pop("packing")
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} has a separate attention mask")
    if packing.runs is not None and can_attend_to_runs(module, query, key, value, arguments):
        return attend_to_runs(query, key, value, packing.runs, arguments.get("scaling")), None
    # All blocks are unpacked at once. Otherwise the backward pass would make a gradient of the whole row for each block.
    unpacked = [_unpack(states.squeeze(0), packing) for states in (query, key, value)]
    outputs = []
    for q, k, v in zip(*unpacked, strict=True):
        output, _ = sdpa(module, q, k, v, None, **arguments)
        outputs.append(output.flatten(0, 1))
    unpacked_outputs = torch.cat(outputs)
    if packing.runs is not None:
        return packing.runs.pack(unpacked_outputs)[None], None
    return unpacked_outputs.index_select(0, packing.token_indices)[None], None


def _unpack(states: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """Unpack [heads, tokens, head size] into one [rows, heads, longest, head size] per block."""
    result = states.transpose(0, 1)
    if packing.runs is not None:
        result = packing.runs.gather(result, packing.runs.padded)
    else:
        result = result.index_select(0, packing.sources)
    parts = torch.split(result, [rows * longest for rows, longest in packing.blocks])
    return [
        part.view(rows, longest, *result.shape[1:]).transpose(1, 2)
        for part, (rows, longest) in zip(parts, packing.blocks, strict=True)
    ]


AttentionInterface.register(ATTENTION_NAME, _attention)


@contextmanager
def uncompiled_attention() -> Iterator[None]:
    """Keep packed attention out of the code of compiled layers inside the context.

    The number of blocks differs between micro-batches, so nearly each of them would need other code.
    """
    AttentionInterface.register(ATTENTION_NAME, _without_compiler())
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, _attention)


@functools.cache
def _without_compiler() -> Callable[..., tuple[torch.Tensor, None]]:
    """Return the attention as a function that torch.compile calls. Compiled code refers to it, so there is only one."""
    result: Callable[..., tuple[torch.Tensor, None]] = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]
    return result
