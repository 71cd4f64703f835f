"""The driver of the backend: a CPU."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase as _Base


class Driver(_Base):  # type: ignore[misc]
    """Driver of the CPU, without a launcher."""

    def __init__(self) -> None:
        """Load no library."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu


Driver.__abstractmethods__ = frozenset()
