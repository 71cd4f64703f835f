"""Devices that the planner knows: memory, peak FLOP/s, memory bandwidth and links; and names such as 8xH100-80GB.

Memory is what nvidia-smi reports. FLOP/s are those of dense matrices with float32 accumulation, without sparsity; float32 is
that of the CUDA cores, because Quartet does not use TF32. Links are per direction: half of the data sheets' bidirectional
numbers. The source of each row is NVIDIA's document beside it. Some data sheets give bf16 with sparsity, twice the number here.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

from quartet.errors import ConfigError
from quartet.system.machine import free_memory_bytes

MIB, TERA, GIGA = 2**20, 10**12, 10**9
MAX_DEVICES, MAX_NODES = 1024, 128
NETWORK_BYTES_PER_SECOND = 50 * GIGA
"""Bandwidth between nodes per GPU: one 400 Gbit/s InfiniBand adapter for each, as in NVIDIA DGX H100."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU of a machine. ``link``: bytes/s to a GPU of the same node, in one direction."""

    name: str
    memory: int
    half_flops: float
    float_flops: float
    bandwidth: float
    link: float
    host_link: float

    @property
    def is_cpu(self) -> bool:
        """Return whether this is a CPU."""
        return self.name == "cpu"

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s in a data type."""
        return self.float_flops if dtype == "float32" else self.half_flops


def _gpu(name: str, mib: int, half: float, single: float, bandwidth: float, link: float, host: float = 32) -> Device:
    return Device(name, mib * MIB, half * TERA, single * TERA, bandwidth * GIGA, link * GIGA, host * GIGA)


GPUS = {
    device.name: device
    for device in (
        #    name              MiB    bf16  fp32  GB/s  link  PCIe GB/s
        _gpu("B200-180GB", 183_359, 2250, 75, 8000, 900, 64),  # HGX B200 data sheet, an eighth of its board
        _gpu("H200-141GB", 143_771, 989, 66.9, 4800, 450, 64),  # H200 data sheet, SXM
        _gpu("H100-80GB", 81_559, 989, 66.9, 3350, 450, 64),  # H100 data sheet and Hopper white paper, SXM5
        _gpu("H100PCIe-80GB", 81_559, 756, 51.2, 2000, 64, 64),  # H100 PCIe product brief and Hopper white paper
        _gpu("A100-80GB", 81_920, 312, 19.5, 2039, 300),  # A100 data sheet, SXM
        _gpu("A100-40GB", 40_960, 312, 19.5, 1555, 300),  # A100 data sheet, SXM
        _gpu("L40S-48GB", 46_068, 362, 91.6, 864, 32),  # L40S data sheet
        _gpu("L4-24GB", 23_034, 121, 30.3, 300, 32),  # L4 data sheet, and Ada white paper 2.01 for dense bf16
        _gpu("A10-24GB", 23_028, 125, 31.2, 600, 32),  # A10 data sheet
        _gpu("A10G-24GB", 23_028, 70, 35, 600, 32),  # A10G data sheet
        _gpu("RTX4090-24GB", 24_564, 165, 82.6, 1008, 32),  # Ada white paper, table of the GeForce RTX 4090
        _gpu("RTX3090-24GB", 24_576, 71, 35.6, 936, 32),  # GA102 white paper, table of the GeForce RTX 3090
    )
}
"""GPUs by name. H100, H200 and A100 are the SXM boards with NVLink; the others connect over PCIe x16, generation 4,
or 5 for H100PCIe. AMD's GPUs are left out: Quartet was not tried on ROCm."""

CPU = Device("cpu", 0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""A CPU before it is measured."""
_NAME = re.compile(r"(?:([1-9][0-9]{0,3})x)?([A-Za-z0-9]+-[0-9]+GB)")


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` machines with ``per_node`` equal devices each."""

    device: Device
    per_node: int
    nodes: int = 1

    @property
    def total(self) -> int:
        """Number of devices."""
        return self.per_node * self.nodes

    def link(self, devices: int) -> float:
        """Return the bytes/s per device, in one direction, between this many neighbouring devices."""
        return self.device.link if devices <= self.per_node else NETWORK_BYTES_PER_SECOND

    def __str__(self) -> str:
        if self.device.is_cpu:
            return "cpu"
        return f"{f'{self.nodes} nodes of ' if self.nodes > 1 else ''}{self.per_node}x{self.device.name}"


def parse_gpus(text: str, nodes: int = 1) -> Cluster:
    """Return the devices that a name such as 8xH100-80GB stands for; ``cpu`` is measured. Raises ConfigError."""
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"--nodes {nodes}: expected 1 to {MAX_NODES}; correct it")
    if text == "cpu":
        if nodes > 1:
            raise ConfigError(f"--nodes {nodes}: cpu is this machine; expected 1 node; remove --nodes")
        return Cluster(measured_cpu(), 1)
    match = _NAME.fullmatch(text)
    known = f"cpu, or COUNTxNAME, with COUNT of at least 1 and NAME one of {', '.join(GPUS)}"
    if match is None or match[2] not in GPUS:
        raise ConfigError(f"--gpus {text!r}: unknown device or count; expected {known}; for example 8xH100-80GB")
    count = int(match[1] or 1)
    if count * nodes > MAX_DEVICES:
        raise ConfigError(
            f"--gpus {text}: {count * nodes} devices with {nodes} nodes; expected at most {MAX_DEVICES}; lower it"
        )
    return Cluster(GPUS[match[2]], count, nodes)


def measured_cpu() -> Device:
    """Return this machine's CPU: free memory, FLOP/s of a float32 matmul and bandwidth of a copy, the best of several.

    The matmul is NumPy's, because the command does not import torch. bfloat16 counts like float32: few CPUs have it in hardware.
    """
    import numpy as np

    size, best = 1024, 0.0
    matrix = np.ones((size, size), np.float32)
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    values, bandwidth = np.zeros(2**25, np.float32), 0.0
    target = np.zeros_like(values)
    for _ in range(4):
        start = time.perf_counter()
        np.copyto(target, values)
        bandwidth = max(bandwidth, 2 * values.nbytes / (time.perf_counter() - start))
    return replace(calibrated(CPU, best, bandwidth), memory=free_memory_bytes())


def calibrated(device: Device, flops: float, bandwidth: float) -> Device:
    """Return ``device`` with measured peaks."""
    return replace(
        device, half_flops=flops, float_flops=flops, bandwidth=bandwidth, link=bandwidth, host_link=bandwidth
    )
