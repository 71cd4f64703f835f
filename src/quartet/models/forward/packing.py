"""Sequences of different lengths in one forward pass without pads: all tokens in one row, and attention within each sequence.

Everything but attention computes token by token, so the model is given one long row. Attention spreads it out into a row per
sequence, computes them all causally, and puts them back in line; neighbours of much the same length are computed together. A
prompt that several sequences begin with stands in the row once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quartet.models.forward.model_capabilities import accepts_argument, attends_to_all, device_of, vocabulary_size

MIN_LENGTH_RATIO = 0.6
"""Sequences are computed together while the shortest has at least this share of the longest one's tokens."""
ATTENTION_NAME = "quartet_packed"
"""Of the attention here, among transformers' own."""
TokenIndices = NDArray[np.int64]
"""Where the tokens of a sequence stand in the row of all, int64 [tokens], rising."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a hidden state, over the largest hidden state, between packed and padded."""
_packing_checks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a row of tokens stand, there and where attention has spread them out.

    ``position_ids`` int64 [1, tokens]: from 0 in each sequence. ``blocks``: rows and longest of the sequences that are attended
    to together; spread out, one block's rows x longest follow another's. ``sources`` int64 [all of these]: which token of the row
    stands there, any where there is none. ``token_indices`` int64 [tokens]: where each token stands among them, in
    the first of its sequences.
    """

    position_ids: torch.Tensor
    blocks: tuple[tuple[int, int], ...]
    sources: torch.Tensor
    token_indices: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequence[TokenIndices], device: torch.device | str) -> Packing:
        """The packing of sequences, each given by where its tokens stand in the row of all; the fewest blocks where the longest
        come first. Tokens that no sequence before has stand behind those of all before.
        """
        positions = np.zeros((1, 1 + max(int(sequence[-1]) for sequence in sequences)), np.int64)
        blocks, sources, token_indices = list[tuple[int, int]](), list[TokenIndices](), list[TokenIndices]()
        seen = start = 0
        for together in _group_by_length(sequences):
            longest = max(map(len, together))
            blocks.append((len(together), longest))
            for sequence in together:
                positions[0, sequence] = np.arange(len(sequence))
                token_indices.append(start + np.flatnonzero(sequence >= seen))
                start += longest
                # Positions after the end of a sequence are masked by causal attention, and their outputs are not read.
                sources.append(np.pad(sequence, (0, longest - len(sequence))))
                seen = max(seen, 1 + int(sequence[-1]))
        flat = (positions, np.concatenate(sources), np.concatenate(token_indices))
        position_ids, at, taken = (torch.from_numpy(array).to(device) for array in flat)
        return cls(position_ids, tuple(blocks), at, taken)


def _group_by_length(sequences: Sequence[TokenIndices]) -> list[list[TokenIndices]]:
    """The sequences, those together that are computed together."""
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
    """While it lasts the model attends within sequences; gives what its forward pass takes besides the tokens [1, tokens].

    Nothing for None, where there is a row for each sequence.
    """
    if packing is None:
        yield {}
        return
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION_NAME
    try:
        yield {"position_ids": packing.position_ids, "packing": packing}
    finally:
        model.config._attn_implementation = before


def logits_at_positions(
    model: nn.Module, input_ids: torch.Tensor, keep: torch.Tensor, packing: Packing | None = None, **arguments: Any
) -> torch.Tensor:
    """The logits at the positions ``keep``: [n, vocabulary].

    These are positions int64 [n] in a row [1, tokens] with a ``packing``; or bool like ``input_ids`` int64 [rows, longest], read
    row after row. ``arguments`` go to the model. The other positions never meet the vocabulary projection, which for small models
    is the larger part of the work.
    """
    # As many positions as tokens: nothing would be spared, and the answer's shape would not tell which they are.
    some = packing is None or len(keep) != input_ids.shape[1]
    if some and accepts_argument(model, "logits_to_keep"):
        arguments["logits_to_keep"] = keep
    with packed_attention(model, packing) as more:
        logits: torch.Tensor = model(input_ids=input_ids, **arguments, **more).logits
    if packing is not None and some and logits.shape[1] == len(keep):
        # Not [0], whose gradient is a copy among zeros.
        return logits.squeeze(0)
    # A model that does not know the form of ``keep``, or has no such argument, answers for every position.
    return logits if logits.ndim == 2 else select_positions(logits, keep)


def select_positions(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``states`` [rows, longest, size], or [1, tokens, size], at the positions ``keep``: [n, size].

    ``keep``: see ``logits_at_positions``.
    """
    return states[keep] if keep.dtype == torch.bool else states.squeeze(0).index_select(0, keep)


def hidden_states(backbone: Any, input_ids: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
    """Those of the last layer, [rows, longest, hidden], or [1, tokens, hidden] with a ``packing``."""
    with packed_attention(backbone, packing) as more:
        hidden: torch.Tensor = backbone(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


def supports_packing(model: Any) -> bool:
    """Return whether a model or value model computes the same for packed and padded sequences. Each model is tried once."""
    base = model.base_model
    if base not in _packing_checks:
        _packing_checks[base] = _is_candidate(base) and _matches_padded(base)
    return _packing_checks[base]


def _is_candidate(base: Any) -> bool:
    return (
        attends_to_all(base) and base.config._attn_implementation == "sdpa" and accepts_argument(base, "position_ids")
    )


@torch.no_grad()
def _matches_padded(base: Any) -> bool:
    device = device_of(base)
    ids = torch.arange(9, device=device) % vocabulary_size(base)
    # The first two in one block, with two tokens in common, the last in another.
    rows = [[0, 1, 2, 3, 4], [0, 1, 5, 6], [7, 8]]
    packing = Packing.of([np.array(row) for row in rows], device)
    padded = torch.stack([ids[row + [0] * (5 - len(row))] for row in rows])
    expected = hidden_states(base, padded).flatten(0, 1)[[0, 1, 2, 3, 4, 7, 8, 10, 11]]
    try:
        result = hidden_states(base, ids[None], packing)[0]
    except (KeyError, TypeError, ValueError):
        # A model that does not hand on what its attention needs.
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
    """Of transformers: query, key and value [1, heads, tokens, head size] -> [1, tokens, heads, head size]."""
    packing: Packing = arguments.pop("packing")
    # All blocks at once: each for itself would have a gradient of its own for the whole row on the way back.
    spread = [_unpack(states.squeeze(0), packing) for states in (query, key, value)]
    outputs = []
    for q, k, v in zip(*spread, strict=True):
        output, _ = sdpa_attention_forward(module, q, k, v, None, **arguments)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.token_indices)[None], None


def _unpack(states: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """[heads, tokens, head size] -> for each block [rows, heads, longest, head size]."""
    result = states.transpose(0, 1).index_select(0, packing.sources)
    parts = torch.split(result, [rows * longest for rows, longest in packing.blocks])
    return [
        part.view(rows, longest, *result.shape[1:]).transpose(1, 2)
        for part, (rows, longest) in zip(parts, packing.blocks, strict=True)
    ]


AttentionInterface.register(ATTENTION_NAME, _attention)
