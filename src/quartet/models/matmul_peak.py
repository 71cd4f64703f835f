"""Rate of large matmuls, of which the utilisation of a device is a fraction."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.torch_settings import torch_threads
from quartet.models.weights.loading import DTYPES

CPU_SIZES, GPU_SIZES = (512, 1024), (4096, 8192)
ROUNDS = 4


@lru_cache(maxsize=8)
def matmul_peak(device: str, dtype: str, threads: int | None = None) -> float:
    """Return the FLOP/s of large matmuls on a device, the best of several; 0 if there is no memory for them.

    On a CPU: with ``threads`` threads, None for torch's number, by the CPU time of the process, so that other processes of the
    machine do not count.
    """
    generator, best = torch.Generator(device).manual_seed(0), 0.0
    try:
        with torch_threads(threads), onednn_linear():
            for size in GPU_SIZES if device.startswith("cuda") else CPU_SIZES:
                a, b = (torch.randn(size, size, device=device, generator=generator).to(DTYPES[dtype]) for _ in range(2))
                best = max(best, *(2 * size**3 / _seconds(a, b) for _ in range(ROUNDS)))
    except torch.OutOfMemoryError:
        pass
    return best


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds of one matmul."""
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        torch.cuda.synchronize(a.device)
        return time.perf_counter() - start
    start = time.process_time()
    torch.nn.functional.linear(a, b)
    return max(1e-9, (time.process_time() - start) / torch.get_num_threads())
