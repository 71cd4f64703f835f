"""Snapshots of models in host memory. The model can be used and trained while its snapshot is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quartet.errors import StorageFailed, first_line
from quartet.models.hf_logging import suppress_hf_logging
from quartet.system.durable_files import is_storage_error, replace_directory

Writer = Callable[[Path], None]
"""Function that writes part of a model into an existing directory, on any thread. Call it at most once."""


def host_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the model's state into host memory.

    Tied weights share one copy. Frozen weights that are in host memory already are not copied, because nothing changes them.
    """
    copies: dict[int, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in copies:
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            copies[id(value)] = value.detach().to("cpu", copy=not frozen)
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
        raise save_failure(directory, error) from error


def save_failure(directory: Path, error: Exception) -> Exception:
    """Return StorageFailed if the disk refused a save, else ``error``."""
    if not is_storage_error(error):
        return error
    return StorageFailed(
        f"model directory {directory}: cannot be written: {_reason(error)}; the previous content is unchanged. "
        "Free space on that disk, or give a writable directory, and save again"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
