"""From ragged sequences to micro-batches: which sequences share a forward pass, and where their response tokens are.

Sequences are padded on the right. Under causal attention a real token never sees the pads that follow it, so no attention mask
is needed, position ids are 0, 1, 2... in every row, and attention keeps its fast causal path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.errors import InvalidRequest
from quartet.types import IntArray, TokenBatch


def micro_batches(lengths: Sequence[int] | IntArray, max_tokens: int) -> list[list[int]]:
    """A partition of the sequence indices such that rows x longest is at most ``max_tokens``, pads included.

    Neighbours in length share a micro-batch, the longest come first (so that running out of memory shows at once), equal lengths
    keep their order. A sequence longer than ``max_tokens`` goes alone. Depends on the arguments only. Raises InvalidRequest.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens {max_tokens}: expected at least 1")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable").tolist()
    groups: list[list[int]] = []
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // max(1, int(sizes[order[start]])))
        groups.append(order[start : start + rows])
        start += rows
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

    ``input_ids`` int64 [rows, longest]. ``predicts`` bool [rows, longest]: the positions [p-1, p+r-1) of each row, whose outputs
    are about its response tokens (the logits at t-1 score token t). Read row after row they give n tokens, for which
    ``targets`` int64 [n] are the token ids and ``places`` int64 [n] the indices into flat [response tokens] arrays.
    ``lengths`` int64 [rows]: how many of them are each row's.
    """

    input_ids: torch.Tensor
    predicts: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        """The number of response tokens, n."""
        return self.targets.shape[0]


def lay_out(batch: TokenBatch, rows: Sequence[int], device: torch.device | str) -> MicroBatch:
    """The sequences ``rows`` of ``batch`` as one micro-batch on ``device``, in the order given."""
    starts = _starts(batch.lengths)
    response_starts = _starts(batch.response_lengths)
    sequences, targets, places = [], [], []
    for row in rows:
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        sequence = batch.token_ids[starts[row] : starts[row] + prompt + response]
        sequences.append(sequence)
        targets.append(sequence[prompt:])
        places.append(np.arange(response_starts[row], response_starts[row] + response))
    input_ids = right_pad(sequences, device)
    predicts = np.zeros(tuple(input_ids.shape), np.bool_)
    for index, row in enumerate(rows):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        predicts[index, prompt - 1 : prompt + response - 1] = True
    return MicroBatch(
        input_ids=input_ids,
        predicts=torch.from_numpy(predicts).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        places=torch.from_numpy(np.concatenate(places).astype(np.int64)).to(device),
        lengths=torch.tensor([len(target) for target in targets]).to(device),
    )


def _starts(lengths: IntArray) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
