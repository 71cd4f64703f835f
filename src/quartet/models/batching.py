"""From ragged sequences to micro-batches: which sequences share a forward pass, and where their response tokens are.

Sequences of a model that can be computed packed follow one another in one row, without pads. For others they are padded on the
right: under causal attention a real token never sees the pads that follow it, so no attention mask is needed, position ids are
0, 1, 2... in every row, and attention keeps its fast causal path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.errors import InvalidRequest
from quartet.models.forward import device_of
from quartet.models.packing import Packing, packs
from quartet.types import IntArray, TokenBatch

SPREAD = 4
"""Rows x longest of what attention sees, over the tokens that a packed micro-batch may have."""


def micro_batches(lengths: Sequence[int] | IntArray, max_tokens: int, packed: bool = False) -> list[list[int]]:
    """A partition of the sequence indices such that rows x longest is at most ``max_tokens``, pads included.

    ``packed``: there are no pads, so that the sum of the lengths is; attention, which spreads rows out, sees at most ``SPREAD``
    times as many. Neighbours in length share a micro-batch, the longest come first (so that running out of memory shows at
    once), equal lengths keep their order. A sequence longer than ``max_tokens`` goes alone. Depends on the arguments only.
    Raises InvalidRequest.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens {max_tokens}: expected at least 1")
    sizes = np.asarray(lengths, np.int64)
    groups: list[list[int]] = []
    tokens = rows = 0
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        if not groups or len(groups[-1]) == rows or (packed and tokens + size > max_tokens):
            groups.append([])
            tokens, rows = 0, max(1, max_tokens * (SPREAD if packed else 1) // max(1, size))
        groups[-1].append(index)
        tokens += size
    return groups


def right_pad(sequences: Sequence[IntArray], device: torch.device | str) -> torch.Tensor:
    """Token ids as int64 [rows, longest], padded on the right with 0.

    The pad value is never compared with anything: lengths travel beside it, and id 0 is an ordinary token.
    """
    padded = np.zeros((len(sequences), max(len(sequence) for sequence in sequences)), np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    return torch.from_numpy(padded).to(device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid out for one forward pass, and the places of their response tokens.

    ``rows``: the sequences, by index in the batch. ``input_ids`` int64 [rows, longest], or [1, tokens] where there is a
    ``packing``. ``predicts`` bool, of the same shape: the positions [p-1, p+r-1) of each sequence, whose outputs are about its
    response tokens (the logits at t-1 score token t). Read in order they give n tokens, for which ``targets`` int64 [n] are the
    token ids and ``places`` int64 [n] the indices into flat [response tokens] arrays. ``lengths`` int64 [rows]: how many of them
    are each sequence's. ``last`` int64 [rows]: where each ends, in the flat ``input_ids``.
    """

    rows: list[int]
    input_ids: torch.Tensor
    packing: Packing | None
    predicts: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor

    def __len__(self) -> int:
        """The number of response tokens, n."""
        return self.targets.shape[0]


def laid_out(
    model: Any,
    batch: TokenBatch,
    max_tokens: int,
    rows: IntArray | NDArray[np.int64] | None = None,
    whole: bool = False,
) -> Iterator[MicroBatch]:
    """The sequences of ``batch``, or ``rows`` of them, in micro-batches of at most ``max_tokens``, as ``model`` takes them.

    The last token of a sequence predicts none of it and is left out, unless they are to be ``whole``.
    """
    chosen = np.arange(len(batch)) if rows is None else rows
    packed = packs(model)
    for group in micro_batches(batch.lengths[chosen] - (not whole), max_tokens, packed):
        yield lay_out(batch, chosen[group].tolist(), device_of(model), packed, whole)


def lay_out(
    batch: TokenBatch, rows: Sequence[int], device: torch.device | str, packed: bool = False, whole: bool = False
) -> MicroBatch:
    """The sequences ``rows`` of ``batch`` as one micro-batch on ``device``, in the order given; ``whole`` as of ``laid_out``."""
    starts = _starts(batch.lengths)
    response_starts = _starts(batch.response_lengths)
    sequences, targets, places = [], [], []
    for row in rows:
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        sequence = batch.token_ids[starts[row] : starts[row] + prompt + response]
        sequences.append(sequence if whole else sequence[:-1])
        targets.append(sequence[prompt:])
        places.append(np.arange(response_starts[row], response_starts[row] + response))
    lengths = np.array([len(sequence) for sequence in sequences])
    if packed:
        input_ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64)[None]).to(device)
        begins = _starts(lengths)
    else:
        input_ids = right_pad(sequences, device)
        begins = np.arange(len(rows)) * int(lengths.max())
    predicts = np.zeros(input_ids.numel(), np.bool_)
    for begin, row in zip(begins, rows, strict=True):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        predicts[begin + prompt - 1 : begin + prompt + response - 1] = True
    return MicroBatch(
        rows=list(rows),
        input_ids=input_ids,
        packing=Packing.of(lengths.tolist(), device) if packed else None,
        predicts=torch.from_numpy(predicts).view(input_ids.shape).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        places=torch.from_numpy(np.concatenate(places).astype(np.int64)).to(device),
        lengths=torch.tensor([len(target) for target in targets]).to(device),
        last=torch.from_numpy(begins + lengths - 1).to(device),
    )


def _starts(lengths: IntArray | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
