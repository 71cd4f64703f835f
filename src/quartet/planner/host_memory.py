"""Memory of the machine or container in which a role runs: processes, the model while it loads, copies for checkpoints.

`quartet plan --helm-values` and the presets of the chart share this arithmetic. The chart repeats ``pod_bytes`` in its template
(`helm/quartet/templates/_resources.tpl`); a test compares the two. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quartet.model_files.memory import training_state
from quartet.model_files.shape import FLOAT32_BYTES
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork

GPU_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process with CUDA: libraries, kernels, pinned buffers, and messages of calls. An estimate."""
CPU_PROCESS_BYTES = 512 * 2**20
"""Host memory of a process without a GPU: libraries, the tokenizer, and messages of calls. An estimate."""
HOST_FRACTION = 0.85
"""Fraction of a container's memory that the formulas fill. The rest is for fragmentation and files in the page cache."""
PUBLISHED_COPIES = 2
"""Number of copies of the weights in an actor with separate generators, and in each generator: the newest version, and encoded
differences to the ones before, which take less."""
ONE_RANK = Parallel()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory of a role. ``process``: of each rank. ``load``: of one copy of the weights.

    ``state``: of the copy of weights and optimizer that a checkpoint needs, 0 for a frozen model. ``moments``: of the optimizer's
    moments, which are in host memory with ``offload.optimizer``.
    """

    process: float
    load: float
    state: float = 0.0
    moments: float = 0.0

    def pod_bytes(
        self, ranks: int, nodes: int = 1, parallel: Parallel = ONE_RANK, publishes: bool = False, offload: bool = False
    ) -> float:
        """Return the bytes of a pod with ``ranks`` of a group over ``nodes`` pods.

        ``publishes``: generators take the weights. ``offload``: the moments are in host memory. Each rank loads its part of the
        model, or all of it if the group is tensor parallel. Loading ends before the copies for checkpoints are made.
        """
        parts = parallel.replicate / nodes
        loading = self.load * (ranks if parallel.tensor > 1 else parts)
        copies = self.state * min(1.0, parts) + (PUBLISHED_COPIES * self.load if publishes else 0.0)
        copies += self.moments * parts if offload else 0.0
        return (self.process * ranks + max(loading, copies)) / HOST_FRACTION


def host_memory(work: RoleWork, on_gpu: bool, device_bytes: float = 0.0) -> HostMemory:
    """Return the host memory of a role.

    ``device_bytes``: without a GPU, the bytes that the planner counts for the device, with the loaded model and the moments. They
    are in host memory.
    """
    trained = training_state(work.trained, work.trained, work.dtype_bytes, FLOAT32_BYTES if work.is_lora else None)
    state = trained.parameters + trained.master_weights + trained.moments
    if work.has_average:
        # The average, and its copy while it is saved. Without a GPU the planner counts the first.
        state += FLOAT32_BYTES * work.trained * (1 + on_gpu)
    if not on_gpu:
        return HostMemory(CPU_PROCESS_BYTES + device_bytes, 0.0, state)
    return HostMemory(float(GPU_PROCESS_BYTES), float(work.dtype_bytes * work.parameters), state, trained.moments)


def generator_host_memory(work: RoleWork, on_gpu: bool, device_bytes: float = 0.0) -> HostMemory:
    """Return the host memory of a generator: its engine, one process for each GPU, and the weights that it receives."""
    load = float(work.dtype_bytes * work.parameters)
    if not on_gpu:
        return HostMemory(CPU_PROCESS_BYTES + device_bytes, 0.0, PUBLISHED_COPIES * load)
    return HostMemory(float(GPU_PROCESS_BYTES), load, GPU_PROCESS_BYTES + PUBLISHED_COPIES * load)
