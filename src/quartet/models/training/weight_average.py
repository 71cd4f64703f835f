"""Exponential moving average of a policy's trained weights, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from quartet.errors import ModelError
from quartet.models.training.optimizer import MasterWeightAdamW
from quartet.models.weights.snapshot import Writer, host_copy

EMA_FILE = "ema.safetensors"
"""Name of the average in a checkpoint: float32 tensors by the names of the trained parameters."""


class WeightAverage:
    """The average ema <- decay ema + (1 - decay) weights, once per update (Polyak & Juditsky 1992; OpenRLHF: ``enable_ema``).

    It is in float32 and averages the float32 master weights of parameters in half precision. It starts at the initial weights.
    Frozen weights have no average. It uses float32's 4 bytes per trained parameter of host memory.
    """

    def __init__(self, model: nn.Module, optimizer: MasterWeightAdamW, decay: float) -> None:
        """Start at the current weights. ``optimizer``: that of ``model``, all of whose weights are in this process."""
        self._decay = decay
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._weights: dict[str, torch.Tensor] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        for weight in optimizer.stepped_parameters():
            parameter = optimizer.rounded(weight) if optimizer.has_master_weight(weight) else weight
            self._weights[names[id(parameter)]] = weight
            self._parameters[names[id(parameter)]] = parameter
        self._values = {name: host_copy(weight).float() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights. Equal weights leave the average bit-identical."""
        for name, value in self._values.items():
            value.lerp_(self._weights[name].detach().to("cpu", torch.float32), 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights, rounded to its precision, inside the context.

        No other thread may use the model inside the context.
        """
        before = {name: host_copy(parameter) for name, parameter in self._parameters.items()}
        try:
            _copy(self._values, self._parameters)
            yield
        finally:
            _copy(before, self._parameters)

    def snapshot(self) -> Writer:
        """Copy the average. The returned writer writes it. Equal averages give equal bytes."""
        values = {name: value.clone() for name, value in sorted(self._values.items())}
        return lambda directory: safetensors.torch.save_file(values, directory / EMA_FILE)

    def read(self, directory: Path) -> None:
        """Restore the average of a checkpoint. Without one, it starts at the current weights. Raises ModelError."""
        if (directory / EMA_FILE).is_file():
            _copy(_read(directory / EMA_FILE, self._values), self._values)


def apply_average(model: nn.Module, directory: Path) -> None:
    """Give ``model`` the averaged weights of a checkpoint, rounded to its precision. Raises ModelError."""
    parameters = dict(model.named_parameters())
    path = directory / EMA_FILE
    saved = _load(path)
    _copy(_read(path, {name: parameters[name] for name in saved if name in parameters}), parameters)


def _read(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which must have the names and shapes of ``expected``."""
    saved = _load(path)
    if saved.keys() != expected.keys():
        name = min(saved.keys() ^ expected.keys())
        raise ModelError(
            f"average {path}: {name} is only in the file or only in the model; expected that of this model"
        )
    for name, value in saved.items():
        if value.dtype != torch.float32 or value.shape != expected[name].shape:
            raise ModelError(
                f"average {path}: {name} is {value.dtype} {list(value.shape)}; expected torch.float32 "
                f"{list(expected[name].shape)}"
            )
    return saved


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # safetensors raises its own error, or OSError
        raise ModelError(f"average {path}: cannot be read: {error}; take the checkpoint before it") from error


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        targets[name].copy_(value)
