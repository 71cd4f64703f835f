"""Each rank's share of a set of sequences, as micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import TokenBatch
from quartet.models.forward.batching import MicroBatch, build_micro_batch, plan_micro_batches
from quartet.models.forward.model_capabilities import device_of
from quartet.models.forward.packing import supports_packing
from quartet.models.workers.workers import Workers, split_by_tokens

Rows = IntArray | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """Micro-batches of one rank, of which the last ``padding`` repeat a sequence and do not count.

    All ranks of a group have the same number of micro-batches, because the ranks exchange weights and gradients in every forward
    and backward pass.
    """

    micro_batches: list[MicroBatch]
    padding: int = 0

    def __iter__(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield each micro-batch, and whether it counts."""
        counted = len(self.micro_batches) - self.padding
        return ((micro_batch, index < counted) for index, micro_batch in enumerate(self.micro_batches))

    def counted(self) -> list[MicroBatch]:
        """Return the micro-batches that count."""
        return self.micro_batches[: len(self.micro_batches) - self.padding]


def share_of(
    workers: Workers,
    model: Any,
    batch: TokenBatch,
    max_tokens: int,
    rows: Rows | None = None,
    include_last_token: bool = False,
) -> Share:
    """Return this rank's share of ``rows`` of ``batch``, or of all sequences.

    Sequences stay whole, and the shares have nearly equal numbers of tokens. They follow from the arguments and the number of
    shares only, so every rank knows all of them. For ``max_tokens`` and ``include_last_token`` see ``plan_micro_batches``.
    """
    rows = np.arange(len(batch)) if rows is None else rows
    packed, device = supports_packing(model), device_of(model)
    groups, padding = share_rows(
        workers,
        batch.lengths,
        rows,
        lambda part: plan_micro_batches(batch, max_tokens, packed, part, include_last_token),
    )
    return Share([build_micro_batch(batch, group, device, packed, include_last_token) for group in groups], padding)


def share_rows(
    workers: Workers, lengths: IntArray, rows: Rows, plan: Callable[[Rows], list[list[int]]]
) -> tuple[list[list[int]], int]:
    """Return the groups of sequences that this rank computes, of which the last ones do not count, and how many those are.

    ``lengths``: tokens of all sequences. ``rows``: the sequences to compute. ``plan`` groups any of them. See ``share_of``.
    """
    plans = [plan(rows[part]) if part else [] for part in split_by_tokens(lengths[rows], workers.data_size)]
    own, count = plans[workers.data_rank], max(map(len, plans))
    padding = [[int(rows[np.argmin(lengths[rows])])]] * (count - len(own))
    return own + padding, len(padding)
