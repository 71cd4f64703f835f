"""Settings of torch for processes that compute on a GPU: attention kernels, and determinism during updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quartet.errors import ConfigError, ModelError


def set_up_gpu() -> None:
    """Prepare this process for models on a GPU. Outside updates, torch then chooses its fastest kernels.

    In deterministic mode, each write to the key-value cache would sort its indices and copy the cache. The attention of cuDNN
    builds a plan for each shape of a batch, and nearly every batch has another shape. transformers' attention to groups of heads
    takes memory that grows with the square of the length in float32.
    """
    from transformers import AttentionInterface

    from quartet.models.forward.gpu_attention import sdpa

    torch.set_deterministic_debug_mode("default")
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register("sdpa", sdpa)


def release_gpu_memory() -> None:
    """Give the memory that torch holds but does not use back to the GPU, for other processes."""
    torch.cuda.empty_cache()


def check_gpu(index: int) -> None:
    """Start CUDA on a GPU. Raises ConfigError if another process holds the GPU exclusively."""
    try:
        torch.zeros(1, device=f"cuda:{index}")
    except RuntimeError as error:
        if "busy or unavailable" not in str(error):
            raise
        raise ConfigError(
            f"devices [{index}]: another process holds this GPU exclusively; allow several processes with nvidia-smi -i {index} "
            "-c DEFAULT or start NVIDIA's MPS, give each service a separate GPU, or host the services in one process"
        ) from error


@contextmanager
def deterministic_update(device: str | torch.device, role: str, on: bool = True) -> Iterator[None]:
    """Allow only operations with bit-identical results inside the context, if ``device`` is a GPU. Changes nothing on a CPU.

    Only the strict mode makes the backward pass of attention deterministic; the mode that warns does not. The mode belongs to the
    process, not to a thread. ``role`` is the config section of the model. Raises ModelError if the model needs an operation that
    has no deterministic kernel.
    """
    if not on or torch.device(device).type != "cuda":
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ModelError(
            f"{role}: updates of this model are not bit-identical if repeated on a GPU ({str(error).splitlines()[0]}); set "
            f"{role}.deterministic_updates false, or choose another model"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(before)
