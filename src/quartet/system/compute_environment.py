"""Environment variables for a process that computes. Imports no torch, whose libraries read them at their first use."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

SPIN_COUNT = 1000
"""Number of checks for work before a waiting thread sleeps."""
MKL_STRICT = "AUTO,STRICT"
"""The newest instructions of the processor, and a row of a matmul rounds in the same way beside any other rows."""
CPU_INFO = Path("/proc/cpuinfo")


def set_cpu_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set.

    Waiting threads of this process sleep after a short spin. By default they spin for long, which takes the cores from the other
    services. Without a spin, each small matmul waits until they are awake.

    On an Intel processor, MKL rounds a row of a matmul in the same way whatever the other rows and the number of threads are
    (docs/adr/0025-the-same-bits-in-any-batch.md). Processes of a run that generate need the same setting, or their bits differ.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        # Runtimes other than GNU's do not know the second name.
        environment.update({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPIN_COUNT)})
    if is_intel():
        environment.setdefault("MKL_CBWR", MKL_STRICT)


def is_intel() -> bool:
    """Return whether this is an Intel processor. For others, MKL's reproducible code is its slowest."""
    return CPU_INFO.exists() and "GenuineIntel" in CPU_INFO.read_text()


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
