"""A GPU that several processes share: exclusive mode, memory between phases, and copies of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.config.deployment import ServiceConfig
from quartet.errors import ConfigError
from quartet.models.torch_settings import release_gpu_memory
from quartet.services import roles
from tests.device.pretended_gpu import PretendedGpu


def test_a_gpu_that_another_process_holds_is_an_error_that_says_what_to_do(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ServiceConfig(devices=(0,))
    assert roles.device_of(service) == "cuda:0"
    message = "CUDA error: all CUDA-capable devices are busy or unavailable"

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "zeros", refused)
    with pytest.raises(ConfigError, match=r"devices \[0\]: another process holds .* nvidia-smi -i 0 -c DEFAULT"):
        roles.device_of(service)
    message = "CUDA error: unknown"
    with pytest.raises(RuntimeError, match="unknown"):
        roles.device_of(service)


def test_unused_memory_is_given_back(gpu: PretendedGpu) -> None:
    release_gpu_memory()
    assert gpu.emptied == 1
