"""Memory of weights that other processes of this machine can map, on Linux.

The memory is a sealed memfd: a file without a name, which the kernel frees with the last process that has it open or mapped. So
nothing is left after a kill, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import structlog

from quartet.errors import InvalidRequest, OutOfMemory, ServiceUnavailable
from quartet.system.machine import free_memory_bytes
from quartet.weight_transfer.tensors import Bytes

log = structlog.get_logger()

ALIGNMENT = 64
"""Offsets of tensors are multiples of this number of bytes."""
MIN_REGION_BYTES = 2**26
"""Minimum size of a region. Pages that are never written take no memory."""
# Nobody can resize the memory, and nobody else can map it for writing (F_SEAL_FUTURE_WRITE, which Python does not name).
_SIZE_SEALS = (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) if hasattr(fcntl, "F_SEAL_SHRINK") else 0
_SEALS = _SIZE_SEALS | 0x10 if _SIZE_SEALS else 0


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Where a process finds a region: descriptor ``fd`` of process ``pid``. ``num_bytes``: size of the region."""

    pid: int
    fd: int
    num_bytes: int


class Memory:
    """Memory of one tensor. When it is garbage, it goes back to its region.

    ``data``: uint8 [n]. ``region`` and ``offset``: where another process finds it; None in private memory. ``readers``: streams
    and processes that read it; nobody writes while there are any.
    """

    __slots__ = ("data", "offset", "readers", "region")

    def __init__(self, data: Bytes, region: Region | None = None, offset: int = 0) -> None:
        self.data, self.region, self.offset, self.readers = data, region, offset, 0

    def __del__(self) -> None:
        if self.region is not None:
            self.region.free.setdefault(len(self.data), []).append(self.offset)


class Region:
    """Memory that other processes can map. Pages that are never written take no memory."""

    def __init__(self, num_bytes: int, seals: bool = True) -> None:
        """``seals``: see ``seal``. Raises OSError if the system refuses sealed memory."""
        self.fd = -1
        self.fd = os.memfd_create("quartet-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        self.data: Bytes = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS if seals else _SIZE_SEALS)
        self.used = 0
        self.free: dict[int, list[int]] = {}
        """Offsets that are free again, by size in bytes."""

    def seal(self) -> None:
        """Let nobody else map the memory for writing from now on."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def reuse(self, num_bytes: int) -> Memory | None:
        """Return memory of this size that has been used before; None if there is none."""
        free = self.free.get(num_bytes)
        return self._memory(free.pop(), num_bytes) if free else None

    def take(self, num_bytes: int) -> Memory | None:
        """Return memory of this size that has not been used; None if there is no place for it."""
        if self.used + num_bytes > len(self.data):
            return None
        offset, self.used = self.used, self.used + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._memory(offset, num_bytes)

    def _memory(self, offset: int, num_bytes: int) -> Memory:
        return Memory(self.data[offset : offset + num_bytes], self, offset)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Allocator:
    """Memory for tensors: in regions if it is shared, otherwise private."""

    def __init__(self, shares: bool = True, seals: bool = True) -> None:
        """``seals``: regions are sealed at once. Otherwise the caller seals them."""
        self._shares, self._seals, self._regions = shares, seals, list[Region]()

    def allocate(self, sizes: Sequence[int]) -> list[Memory]:
        """Return memory of these sizes in bytes. Raises OutOfMemory if the machine or container has less free memory."""
        found = [next((each for region in self._regions if (each := region.reuse(size))), None) for size in sizes]
        missing = sum(size for size, memory in zip(sizes, found, strict=True) if memory is None)
        if missing > (free := free_memory_bytes()):
            raise OutOfMemory(
                f"weights: {missing / 1e9:.2f} GB of memory are missing for a version, {free / 1e9:.2f} GB are free; give this "
                "machine or container more memory (a container's limit includes the memory that it shares)"
            )
        return [self._new(size) if memory is None else memory for size, memory in zip(sizes, found, strict=True)]

    def _new(self, size: int) -> Memory:
        if not self._shares:
            return Memory(np.empty(size, np.uint8))
        memory = next((each for region in self._regions if (each := region.take(size))), None)
        if memory is None:
            # Each region is twice as large as the one before, so their number stays small.
            last = len(self._regions[-1].data) if self._regions else 0
            try:
                self._regions.append(Region(max(size, MIN_REGION_BYTES, 2 * last), self._seals))
            except (OSError, ValueError) as error:  # A limit of file sizes or address space.
                log.warning("weights are not shared between processes", reason=str(error))
                self._shares = False
                return self._new(size)
            memory = self._regions[-1].take(size)
            assert memory is not None
        return memory


@cache
def machine() -> str:
    """Return the name of the part of this machine in which processes can map each other's memory; empty if none can.

    It consists of the kernel's boot and the namespace of process numbers, so containers that do not share it differ.
    """
    try:
        Region(mmap.PAGESIZE)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except (AttributeError, OSError) as error:  # No memfd: not Linux, an old kernel, or a sandbox that refuses it.
        log.info("weights are not shared between processes", reason=str(error))
        return ""


def map_region(region: SharedRegion, writes: bool = False) -> Bytes:
    """Map a region of another process on this machine: uint8 [num_bytes]. Read-only, unless the caller ``writes`` to it.

    Raises ServiceUnavailable if this process cannot open or map it, InvalidRequest if it is not a sealed memfd of this size.
    """
    try:
        # O_NONBLOCK: a pipe with this number must not wait for its other end.
        mode = os.O_RDWR if writes else os.O_RDONLY
        fd = os.open(f"/proc/{region.pid}/fd/{region.fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ServiceUnavailable(f"weights: cannot open the shared memory of process {region.pid}: {error}") from None
    try:
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        expected = _SIZE_SEALS if writes else _SEALS
        if not stat.S_ISREG(status.st_mode) or seals & expected != expected or status.st_size != region.num_bytes:
            raise InvalidRequest(
                f"weights: descriptor {region.fd} of process {region.pid} is no sealed memory of {region.num_bytes} bytes"
            )
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        return np.frombuffer(mmap.mmap(fd, region.num_bytes, prot=protection), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise ServiceUnavailable(f"weights: cannot map the shared memory of process {region.pid}: {error}") from None
    finally:
        os.close(fd)
