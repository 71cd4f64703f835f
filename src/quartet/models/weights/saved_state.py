"""Parts of tensors, and named tensors on disk of which a process reads its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from quartet.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor of ``shape`` that starts at ``offsets``. Its values are ``tensor``, which is all of it in one process.

    ``saved_here``: whether this process saves the block, and no other one that has it, too.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    saved_here: bool = True

    @classmethod
    def whole(cls, tensor: torch.Tensor, saved_here: bool = True) -> Part:
        """Return a complete tensor as its own part."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim, saved_here)

    def of(self, tensor: torch.Tensor) -> Part:
        """Return the same block of another tensor of the same shape."""
        return replace(self, tensor=tensor)

    @property
    def region(self) -> tuple[slice, ...]:
        """Place of the block in the complete tensor."""
        return tuple(
            slice(start, start + length) for start, length in zip(self.offsets, self.tensor.shape, strict=True)
        )


class SavedState(Protocol):
    """Named tensors on disk."""

    @property
    def place(self) -> str:
        """Name and path of the files, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each complete tensor."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts that were saved with the tensors."""

    def read(self, parts: Mapping[str, Part]) -> None:
        """Copy the values on disk into ``parts``, by the names of their tensors. Raises any error of the files."""


class StateFile:
    """The tensors of one safetensors file. See ``SavedState``."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises any error of the file."""
        self.place = str(path)
        self._path = path
        with safetensors.safe_open(path, framework="pt") as file:
            self.metadata: dict[str, str] = file.metadata() or {}
            self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    @torch.no_grad()
    def read(self, parts: Mapping[str, Part]) -> None:
        with safetensors.safe_open(self._path, framework="pt") as file:
            for name, part in parts.items():
                read_block(file, name, part.region, part.tensor)


def read_block(file: Any, name: str, region: tuple[slice, ...], target: torch.Tensor) -> None:
    """Copy a block of a tensor in an open safetensors ``file`` into ``target``."""
    if target.numel():
        target.copy_(file.get_slice(name)[region] if region else file.get_tensor(name))


def check_shapes(state: SavedState, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless ``state`` has exactly the ``expected`` tensors, by their shapes."""
    for names, what in (
        (expected.keys() - state.shapes.keys(), "lacks"),
        (state.shapes.keys() - expected.keys(), "has too many:"),
    ):
        if names:
            raise ModelError(
                f"{state.place}: {what} {len(names)} weights, the first {min(names)!r}; expected a checkpoint of this model"
            )
    for name, shape in expected.items():
        if state.shapes[name] != shape:
            raise ModelError(f"{state.place}: {name} has shape {state.shapes[name]}, the model expects {shape}")
