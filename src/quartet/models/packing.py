"""Sequences of different lengths in one forward pass without pads: all tokens in one row, and attention within each sequence.

Everything but attention computes token by token, so the model is given one long row. Attention spreads it out into a row per
sequence, computes them all causally, and puts them back in line; neighbours of much the same length are computed together.
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

from quartet.models.forward import attends_to_all, device_of, takes, vocabulary_size

ALIKE = 0.6
"""Sequences are computed together while the shortest has at least this share of the longest one's tokens."""
NAME = "quartet_packed"
"""Of the attention here, among transformers' own."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a hidden state, over the largest hidden state, between packed and padded."""
_found: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that follow one another and are attended to together.

    ``tokens``: where theirs stand in the row of all. ``places`` int64 [tokens]: of each in rows x longest, row after row.
    """

    tokens: slice
    places: torch.Tensor
    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a row of tokens stand. ``position_ids`` int64 [1, tokens]: from 0 in each sequence."""

    position_ids: torch.Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Packing:
        """The packing of sequences that follow one another; the fewest blocks where the longest come first."""
        blocks, begin, end = [], 0, 0
        for together in _alike(lengths):
            begin, end, longest = end, end + sum(together), max(together)
            places = _positions(together) + np.repeat(np.arange(len(together)) * longest, together)
            blocks.append(Block(slice(begin, end), torch.from_numpy(places).to(device), len(together), longest))
        return cls(torch.from_numpy(_positions(lengths)[None]).to(device), tuple(blocks))


def _positions(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(length) for length in lengths])


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """The lengths, those together that are computed together."""
    found: list[list[int]] = []
    shortest = longest = 0
    for length in lengths:
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < ALIKE * longest:
            shortest = longest = length
            found.append([])
        found[-1].append(length)
    return found


@contextmanager
def packed_attention(model: Any, packing: Packing | None) -> Iterator[dict[str, Any]]:
    """While it lasts the model attends within sequences; gives what its forward pass takes besides the tokens [1, tokens].

    Nothing for None, where there is a row for each sequence.
    """
    if packing is None:
        yield {}
        return
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield {"position_ids": packing.position_ids, "packing": packing}
    finally:
        model.config._attn_implementation = before


def logits_at(
    model: nn.Module, input_ids: torch.Tensor, keep: torch.Tensor, packing: Packing | None = None, **arguments: Any
) -> torch.Tensor:
    """The logits at the positions where ``keep`` bool is set, row after row: [n, vocabulary].

    ``keep`` and ``input_ids`` int64 [rows, longest], or [1, tokens] with a ``packing``; ``arguments`` go to the model. The other
    positions never meet the vocabulary projection, which for small models is the larger part of the work.
    """
    if takes(model, "logits_to_keep"):
        arguments["logits_to_keep"] = keep
    with packed_attention(model, packing) as more:
        logits: torch.Tensor = model(input_ids=input_ids, **arguments, **more).logits
    # A model that does not know the boolean form, or has no such argument, answers for every position.
    return logits if logits.ndim == 2 else logits[keep]


def hidden_states(backbone: Any, input_ids: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
    """Those of the last layer, [rows, longest, hidden], or [1, tokens, hidden] with a ``packing``."""
    with packed_attention(backbone, packing) as more:
        hidden: torch.Tensor = backbone(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


def packs(model: Any) -> bool:
    """Whether a model, or a value model, computes the same for packed sequences as for padded ones: tried once, on some."""
    base = model.base_model
    if base not in _found:
        _found[base] = _can_be_tried(base) and _computes_the_same(base)
    return _found[base]


def _can_be_tried(base: Any) -> bool:
    return attends_to_all(base) and base.config._attn_implementation == "sdpa" and takes(base, "position_ids")


@torch.no_grad()
def _computes_the_same(base: Any) -> bool:
    device = device_of(base)
    ids = torch.arange(11, device=device) % vocabulary_size(base)
    # The first two in one block, the last in another.
    packing = Packing.of((5, 4, 2), device)
    places = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11], device=device)
    padded = torch.zeros(15, dtype=torch.int64, device=device).index_copy(0, places, ids).view(3, 5)
    expected = hidden_states(base, padded).flatten(0, 1)[places]
    try:
        found = hidden_states(base, ids[None], packing)[0]
    except (KeyError, TypeError, ValueError):
        # A model that does not hand on what its attention needs.
        return False
    difference = (found - expected).abs().max() / expected.abs().max()
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
    outputs = []
    for block in packing.blocks:
        q, k, v = (_spread(states[0, :, block.tokens], block) for states in (query, key, value))
        output, _ = sdpa_attention_forward(module, q, k, v, None, **arguments)
        outputs.append(output.flatten(0, 1)[block.places])
    return torch.cat(outputs)[None], None


def _spread(states: torch.Tensor, block: Block) -> torch.Tensor:
    """[heads, tokens, head size] -> [rows, heads, longest, head size], 0 where there is no token."""
    heads, _, size = states.shape
    rows = states.new_zeros(block.rows * block.longest, heads, size)
    return rows.index_copy(0, block.places, states.transpose(0, 1)).view(block.rows, -1, heads, size).transpose(1, 2)


AttentionInterface.register(NAME, _attention)
