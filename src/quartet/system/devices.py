"""Readings of the devices of this process: its GPUs by NVML, or the CPU. See docs/adr/0074-nvml.md."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from quartet.contract.status import DeviceReading
from quartet.system.machine import available_cores, resident_bytes

log = structlog.get_logger()

INTERVAL_SECONDS = 1.0
"""Seconds between two readings. NVML's utilisation covers up to as long."""
Value = TypeVar("Value")


class DeviceMonitor:
    """Readings of the devices of this process, taken once a second on a separate thread, so that no caller waits for a driver."""

    def __init__(self, indices: Sequence[int] = (), interval: float = INTERVAL_SECONDS) -> None:
        """``indices``: torch's indices of the process's GPUs; none for the CPU. The first readings follow after ``interval``."""
        self._read = GpuReader(indices).read if indices else CpuReader().read
        self._interval, self._ended = interval, threading.Event()
        self._readings: tuple[DeviceReading, ...] = ()
        threading.Thread(target=self._follow, name="devices", daemon=True).start()

    def readings(self) -> tuple[DeviceReading, ...]:
        """Return the last readings, at once. Empty before the first."""
        return self._readings

    def close(self) -> None:
        """Take no more readings."""
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._readings = self._read()
            except Exception:
                log.exception("devices cannot be read; they are no longer reported")
                self._readings = ()
                return


class CpuReader:
    """Reader of the CPU time and the memory of this process."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter) -> None:
        """``root`` is the root of the file system, for tests."""
        self._root, self._clock = root, clock
        self._cores, self._total = available_cores(), self._memory_limit()
        self._last = clock(), time.process_time()

    def read(self) -> tuple[DeviceReading, ...]:
        """Return one reading: the share of the cores since the last one, and the memory."""
        (wall, cpu), self._last = self._last, (self._clock(), time.process_time())
        seconds = (self._last[0] - wall) * self._cores
        busy = min(1.0, (self._last[1] - cpu) / seconds) if seconds > 0 else None
        return (DeviceReading("cpu", busy, resident_bytes(self._root), self._total),)

    def _memory_limit(self) -> int:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            return min(machine, int((self._root / "sys/fs/cgroup/memory.max").read_text()))
        except (OSError, ValueError):  # No control group, or no limit ("max").
            return machine


class GpuReader:
    """Reader of GPUs by NVML. What the driver does not report is None, and never 0."""

    def __init__(self, indices: Sequence[int], environment: Mapping[str, str] = os.environ) -> None:
        """``indices`` are torch's, which count the devices of ``CUDA_VISIBLE_DEVICES`` in ``environment``."""
        self._indices, self._environment = indices, environment
        self._nvml = _started_nvml()
        self._handles: dict[int, Any] = {}

    def read(self) -> tuple[DeviceReading, ...]:
        """Return one reading per device, without values for a device that NVML does not know."""
        return tuple(map(self._reading, self._indices))

    def _reading(self, index: int) -> DeviceReading:
        name, nvml = f"cuda:{index}", self._nvml
        if nvml is None:
            return DeviceReading(name)
        if index not in self._handles:
            handle = self._value(lambda: self._find(index))
            if handle is None:
                return DeviceReading(name)
            self._handles[index] = handle
        device = self._handles[index]
        rates = self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(device))
        memory = self._value(lambda: nvml.nvmlDeviceGetMemoryInfo(device))
        milliwatts = self._value(lambda: nvml.nvmlDeviceGetPowerUsage(device))
        return DeviceReading(
            name,
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if milliwatts is None else milliwatts / 1000,
        )

    def _value(self, read: Callable[[], Value]) -> Value | None:
        """Return a value, or None if the device does not report it, as the power of a MIG instance."""
        try:
            return read()
        except self._nvml.NVMLError:
            return None

    def _find(self, index: int) -> Any:
        """Return NVML's handle of a device of torch, None if it cannot be told. CUDA and NVML may number devices differently."""
        nvml = self._nvml
        if (uuid := self._uuid(index)) is not None:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        visible = self._environment.get("CUDA_VISIBLE_DEVICES")
        number = index
        if visible is not None:
            entries = [entry.strip() for entry in visible.split(",")]
            if index >= len(entries) or not entries[index].isdecimal():
                return None
            number = int(entries[index])
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        # CUDA's default order puts the fastest first, which is NVML's order, that of the bus, only among equal devices.
        in_order = self._environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if number >= len(handles) or not (in_order or len({nvml.nvmlDeviceGetName(handle) for handle in handles}) == 1):
            return None
        return handles[number]

    def _uuid(self, index: int) -> str | None:
        """Return the UUID of a device, from ``CUDA_VISIBLE_DEVICES`` or from torch, None if neither has it."""
        entries = [entry.strip() for entry in self._environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        if index < len(entries) and entries[index].startswith(("GPU-", "MIG-")):
            entry = entries[index]
            return next((uuid for uuid in self._uuids() if uuid.startswith(entry)), entry)
        torch = sys.modules.get("torch")
        # Any other question would start the CUDA driver.
        if torch is not None and torch.cuda.is_initialized():
            return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return None

    def _uuids(self) -> list[str]:
        """Return the UUIDs of all GPUs, of which ``CUDA_VISIBLE_DEVICES`` may name a prefix."""
        nvml = self._nvml
        handles = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount()))
        return [nvml.nvmlDeviceGetUUID(handle) for handle in handles]


def _started_nvml() -> Any:
    """Return NVML's module, or None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        log.info("no readings of GPUs: nvidia-ml-py is not installed")
    except pynvml.NVMLError as error:
        log.info("no readings of GPUs", reason=str(error))
    else:
        return pynvml
    return None
