"""The device of a stage. This module does not import TRL, so that a missing GPU is refused in time."""

from __future__ import annotations

import torch

from quartet.config.supervised import StageConfig
from quartet.errors import ConfigError


def device_of(config: StageConfig) -> str:
    """Return "cpu" or "cuda". Raises ConfigError if the config asks for a GPU that torch does not see."""
    has_gpu = torch.cuda.is_available()
    if config.model.device == "cuda" and not has_gpu:
        raise ConfigError(
            "model.device cuda: torch sees no GPU here; check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is built for "
            "CUDA, or remove model.device to train on the CPU"
        )
    return config.model.device or ("cuda" if has_gpu else "cpu")
