"""Weights as bytes in host memory, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TensorType = Literal["F32", "BF16", "F16"]
"""Element type of a weight tensor, by the names of the safetensors format."""
ITEM_BYTES: dict[TensorType, int] = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """One weight tensor. ``data`` uint8 [bytes]: the elements in row-major order, little-endian."""

    dtype: TensorType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of a LoRA adapter whose matrices are among the weights, by the names of PEFT's ``adapter_model.safetensors``."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weights of one policy version.

    ``digest`` identifies the bytes of all ``tensors``: 16 bytes, see ``digests.combined_digest``. ``tensors`` have the names of
    the model's Hugging Face checkpoint; tied weights appear once. With an ``adapter``, the base weights and the adapter's
    matrices are both present, and the base weights never change.
    """

    version: int
    digest: bytes
    tensors: Mapping[str, HostTensor]
    adapter: AdapterSettings | None = None
