"""Environment variables for a process that computes on a GPU. Imports no torch, which reads them when it starts CUDA."""

from __future__ import annotations

from collections.abc import MutableMapping

_DEFAULTS = {
    # cuBLAS needs a fixed workspace to repeat its results, and deterministic mode refuses matmuls without it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Batches of ragged lengths fragment memory otherwise, and what one phase frees would not fit the next.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Sums inside an NVLink switch have no fixed order, so a group would not repeat its results.
    "NCCL_ALGO": "^NVLS,NVLSTree",
}


def set_gpu_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
