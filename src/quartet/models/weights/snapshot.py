"""Snapshots of models in host memory. The model can be used and trained while its snapshot is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quartet.durable_files import is_storage_error, replace_directory
from quartet.errors import StorageFailed
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.workers.workers import SINGLE, Workers

Writer = Callable[[Path], None]
"""Function that writes part of a model into an existing directory, on any thread. Call it at most once."""


def host_state(model: nn.Module, workers: Workers = SINGLE) -> dict[str, torch.Tensor]:
    """Copy the model's state into host memory.

    Tied weights share one copy. Frozen weights that are in host memory already are not copied, because nothing changes them. The
    ``workers`` gather one tensor after the other, and only rank 0 keeps them: the result of the others is empty.
    """
    state = model.state_dict(keep_vars=True)
    copies: dict[int, torch.Tensor] = {}
    # Each weight once, on every rank, because the ranks gather it together.
    for value in {id(value): value for value in state.values()}.values():
        frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        complete = workers.complete(value)
        if workers.rank == 0:
            copies[id(value)] = complete.detach().to("cpu", copy=complete is value and not frozen)
    if workers.rank:
        return {}
    return {name: copies[id(value)] for name, value in state.items()}


def host_copy(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into host memory."""
    return value.detach().to("cpu", copy=True).contiguous()


def write_model(directory: Path, *writers: Writer) -> None:
    """Replace ``directory`` atomically and durably by a directory that the writers fill.

    Raises StorageFailed if the disk refuses it, and any other error of a writer as it is. The previous content then stays, and
    no temporary files are left.
    """

    def fill(target: Path) -> None:
        for write in writers:
            write(target)

    try:
        with suppress_hf_logging():
            replace_directory(directory, fill)
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise StorageFailed(
            f"model directory {directory}: cannot be written: {_reason(error)}; the previous content is unchanged. "
            "Free space on that disk, or give a writable directory, and save again"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
