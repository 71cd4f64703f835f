"""Snapshots: what is to be written of a model, copied into host memory, so that the model goes on while it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quartet.durable_files import replace_directory
from quartet.errors import QuartetError, StorageFailed
from quartet.models.hf_logging import suppress_hf_logging

Writer = Callable[[Path], None]
"""Writes its part of a model into an existing directory, on any thread. To be called once."""


def host_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, copied into host memory.

    Weights that two layers share (tied) share their copy, too. Frozen ones in host memory are not copied: nothing writes to them.
    """
    copies: dict[int, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in copies:
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            copies[id(value)] = value.detach().to("cpu", copy=not frozen)
    return {name: copies[id(value)] for name, value in state.items()}


def host_copy(value: torch.Tensor) -> torch.Tensor:
    """One tensor, copied into host memory."""
    return value.detach().to("cpu", copy=True).contiguous()


def write_model(directory: Path, *writers: Writer) -> None:
    """Let the writers fill a directory that takes the place of ``directory`` when it is whole, and on the disk.

    Raises StorageFailed when it cannot be written: what was there before is untouched, and nothing else is left.
    """

    def fill(target: Path) -> None:
        for write in writers:
            write(target)

    try:
        with suppress_hf_logging():
            replace_directory(directory, fill)
    except QuartetError:
        raise
    except Exception as error:  # OSError; safetensors and tokenizers wrap it into exceptions of their own
        raise StorageFailed(
            f"model directory {directory}: cannot be written: {_reason(error)}; what was there before is untouched. "
            "Free space on that disk, or give a directory of yours, and save again"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
