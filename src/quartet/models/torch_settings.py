"""Settings of torch in this process: CPU threads and memory, GPU kernels, and determinism."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quartet.errors import ConfigError, ModelError

KEPT_BLOCK_BYTES = 2**25
"""Largest block of memory that a process keeps after it is freed."""
KEPT_BYTES = 2**28
"""Freed memory that a process keeps for the next allocation."""
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def set_up_torch(threads: int) -> None:
    """Set the number of CPU threads of this process, and make torch compute the same result for the same input.

    The process also keeps freed memory, see ``keep_freed_memory``.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    # Unlike use_deterministic_algorithms, this does not import torch.compile, which takes a second and is not used.
    torch.set_deterministic_debug_mode("warn")
    # Filling memory helps to find reads before writes, but costs 5 % of an update.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> bool:
    """Keep up to ``KEPT_BYTES`` of freed memory in this process, in one arena for all threads. Return whether that is possible.

    By default, glibc returns each large tensor to the kernel, which clears its pages again at the next allocation. That costs 5
    to 10 % of an update. Only glibc has these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: KEPT_BLOCK_BYTES, _TRIM_THRESHOLD: KEPT_BYTES}
    return mallopt is not None and all(mallopt(name, value) for name, value in settings.items())


def set_num_threads(count: int) -> None:
    """Set the number of CPU threads that the calling thread's computations use. OpenMP keeps it for each calling thread."""
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Compute with ``count`` threads inside the context. None leaves the number unchanged."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
