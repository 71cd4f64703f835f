"""A model between two others of the same architecture: alpha new + (1 - alpha) old, in float32, file by file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from quartet.errors import ModelError


def write_mixed(new: Path, old: Path | None, alpha: float, target: Path) -> None:
    """Write alpha new + (1 - alpha) old to the existing folder ``target``, in float32 (TRL: ``ref_model_mixup_alpha``).

    ``new`` is a folder in Hugging Face format, ``old`` a result of this function for the same model. Without ``old``, writes the
    weights of ``new`` in float32. Host memory holds the tensors of one file. Equal inputs give equal bytes. Raises ModelError if
    the two are not the same model.
    """
    for file in sorted(new.iterdir()):
        if file.suffix == ".safetensors":
            tensors = _mixed(file, None if old is None else old / file.name, alpha)
            safetensors.torch.save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.is_file():
            shutil.copyfile(file, target / file.name)


def _mixed(new: Path, old: Path | None, alpha: float) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safetensors.safe_open(new, framework="pt") as file:
        earlier = None if old is None else _open(old, list(file.keys()))
        for name in file.keys():  # noqa: SIM118
            value = file.get_tensor(name)
            if value.is_floating_point():
                value = value.float()
                if earlier is not None:
                    value = torch.lerp(earlier.get_tensor(name), value, alpha)
            tensors[name] = value
    return tensors


def _open(path: Path, names: list[str]) -> Any:
    try:
        file: Any = safetensors.safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        same = sorted(file.keys()) == sorted(names)
    except Exception as error:  # safetensors raises its own error, or OSError
        raise ModelError(f"reference {path}: cannot be read: {error}; roll back to an earlier checkpoint") from error
    if not same:
        raise ModelError(f"reference {path}: has other weights than the policy; roll back to an earlier checkpoint")
    return file
