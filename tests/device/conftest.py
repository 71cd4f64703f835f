"""Fixtures of the tests on the pretended GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quartet.models.forward import gpu_attention, onednn_linear
from quartet.models.torch_settings import set_up_gpu
from tests.device.pretended_gpu import PretendedGpu, pretended_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """The pretended GPU, with the settings of a service process that uses a GPU."""
    # oneDNN rounds in another way, and a GPU does not use it.
    monkeypatch.setattr(onednn_linear, "is_needed", lambda: False)
    mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.set_deterministic_debug_mode(
        "warn"
    )  # As set_up_torch does, whose other settings are for a process's lifetime.
    set_up_gpu()
    gpu_attention._works.cache_clear()
    try:
        with pretended_gpu() as device:
            yield device
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        gpu_attention._works.cache_clear()


def on_gpu(model: Any) -> Any:
    """Return a copy of a model on the pretended GPU."""
    return copy.deepcopy(model).to("cuda:0")
