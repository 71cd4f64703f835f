"""Deep copies of models on another device."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

_Copied = TypeVar("_Copied")


def copy_to_device(value: _Copied, model: nn.Module, device: str) -> _Copied:
    """Return a deep copy of ``value``, which refers to ``model``, with the model's parameters and buffers on ``device``.

    Each tensor goes there directly. A deep copy that is moved afterwards would need the memory twice on the model's device.
    """
    copies: dict[int, object] = {}
    for parameter in model.parameters():
        moved = parameter.detach().to(device, copy=True)
        copies[id(parameter)] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.detach().to(device, copy=True)
    return copy.deepcopy(value, copies)
