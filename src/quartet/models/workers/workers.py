"""The ranks that compute one model together, as updates and scoring see them. This module covers the group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.errors import QuartetError

Result = TypeVar("Result")


class Workers:
    """A group of one rank, which computes everything itself, without torch.distributed. The base class of larger groups.

    In a larger group, every rank must make the same calls in the same order.
    """

    rank = 0
    """Number of this process, from 0."""
    size = 1
    """Number of processes."""
    data_rank = 0
    """Number of this rank's share of the data, from 0. Ranks that compute slices of the same layers have the same share."""
    data_size = 1
    """Number of shares of the data."""

    def set_up_thread(self) -> None:
        """Prepare the calling thread for computations of the model."""

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which runs one forward pass of the model."""
        return compute()

    def evaluate(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which may run several forward passes of the model, without gradients."""
        return compute()

    def end_trial(self) -> None:
        """Prepare for the next pass after a forward pass that no backward pass follows."""

    def gathered_bytes(self) -> int:
        """Return the bytes of parameters and gradients that an update gathers from the ranks at a time."""
        return 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over the shares of the data, in float64. All ranks get the same bits.

        A group of one returns ``values``.
        """
        return values

    def release(self) -> None:
        """Release the model that the ranks share, so that its memory is free before another one is loaded."""

    def smallest(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks."""
        return value

    def complete(self, value: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor of a weight, in the type in which the model computes."""
        return value

    def exchange(self, text: str) -> list[str]:
        """Return the short ``text`` of every rank, by rank."""
        return [text]

    def raise_on_all(self, error: QuartetError | None) -> None:
        """Raise ``error`` if this rank has one, or ComputationFailed with the text of the first rank that has one."""
        if error is not None:
            raise error

    def agreed(self, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute`` if no rank has an error.

        Raises this rank's QuartetError, or ServiceUnavailable if only other ranks have one. For errors that some of the ranks may
        have, such as a lost connection. ``compute`` reads files or the buffer, which only the deadline of the call limits.
        """
        return compute()


SINGLE = Workers()
"""The group of one rank."""


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: its shard, or all of a tensor that is not sharded."""
    to_local = getattr(value, "to_local", None)
    part: torch.Tensor = value if to_local is None else to_local().detach()
    return part


def split_by_tokens(lengths: Sequence[int] | NDArray[np.signedinteger], size: int) -> list[list[int]]:
    """Partition sequences of ``lengths`` tokens into ``size`` shares of nearly equal numbers of tokens, by index.

    The longest sequence goes first, each to the share with the fewest tokens so far. The indices of a share are ascending. A
    share is empty if there are fewer sequences than shares. The result depends on the arguments only.
    """
    sizes = np.asarray(lengths, np.int64)
    shares: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for index in np.argsort(-sizes, kind="stable").tolist():
        lightest = tokens.index(min(tokens))
        shares[lightest].append(index)
        tokens[lightest] += int(sizes[index])
    return [sorted(share) for share in shares]


def shard_frozen(model: Any, workers: Workers) -> Workers:
    """Shard the parameters of ``model`` over the ranks, in their data type. Return the group that computes with it.

    A group of one keeps the model as it is. A group may hold several models. Every rank must have loaded the
    same weights, or its parts of them.
    """
    if workers.size == 1:
        return workers
    # Imported here because a single process does not need torch.distributed.
    from quartet.models.workers.group import WorkerGroup
    from quartet.models.workers.sharding import shard_model

    assert isinstance(workers, WorkerGroup)
    own = copy(workers)
    shard_model(model.requires_grad_(False), own)
    return own
