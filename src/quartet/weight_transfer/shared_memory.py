"""Memory of weights that other processes of this machine can map, on Linux. ``mapped_regions`` has the other side.

The memory is a sealed memfd: a file without a name, which the kernel frees with the last process that has it open or mapped. So
nothing is left after a kill, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from quartet.errors import OutOfMemory
from quartet.system.machine import free_memory_bytes
from quartet.weight_transfer.descriptors import SharedDirectory
from quartet.weight_transfer.tensors import Bytes

log = structlog.get_logger()

ALIGNMENT = 64
"""Offsets of tensors are multiples of this number of bytes."""
MIN_REGION_BYTES = 2**26
"""Minimum size of a region. Pages that are never written take no memory."""
SIZE_SEALS = (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) if hasattr(fcntl, "F_SEAL_SHRINK") else 0
"""Nobody can resize the memory."""
SEALS = SIZE_SEALS | 0x10 if SIZE_SEALS else 0
"""Nobody else can map it for writing, either (F_SEAL_FUTURE_WRITE, which Python does not name)."""


Slices = tuple[tuple[int, int, int], ...]
"""Rank, begin and end of each slice of a tensor, in bytes."""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Where a process finds a region: descriptor ``fd`` of process ``pid``. ``num_bytes``: size of the region.

    ``socket``: name of the socket of the process in the directory that both see. Empty: the descriptor is in /proc.
    """

    pid: int
    fd: int
    num_bytes: int
    socket: str = ""


class MappedMemory(mmap.mmap):
    """Mapped memory with its descriptor, which other processes find in /proc. It is closed with the last array in the memory."""

    fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Memory:
    """Memory of one tensor. When it is garbage, it goes back to its region.

    ``data``: uint8 [n]. ``region`` and ``offset``: where another process finds it; None in private memory. ``readers``: streams
    and processes that read it; nobody writes while there are any. ``slices``: the ranks of a trainer that have written it, with
    begin and end in bytes; empty if one process has.
    """

    __slots__ = ("data", "offset", "readers", "region", "slices")

    def __init__(self, data: Bytes, region: Region | None = None, offset: int = 0) -> None:
        self.data, self.region, self.offset, self.readers = data, region, offset, 0
        self.slices: Slices = ()

    def __del__(self) -> None:
        if self.region is not None:
            self.region.free.setdefault(len(self.data), []).append(self.offset)


class Region:
    """Memory that other processes can map. Pages that are never written take no memory."""

    def __init__(self, num_bytes: int, seals: bool = True) -> None:
        """``seals``: see ``seal``. Raises OSError if the system refuses sealed memory."""
        self.fd = os.memfd_create("quartet-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            mapping = MappedMemory(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS if seals else SIZE_SEALS)
        except BaseException:
            os.close(self.fd)
            raise
        mapping.fd = self.fd
        self.data: Bytes = np.frombuffer(mapping, np.uint8)
        self.is_sealed = seals
        self.used = 0
        self.free: dict[int, list[int]] = {}
        """Offsets that are free again, by size in bytes."""

    def seal(self) -> None:
        """Let nobody else map the memory for writing from now on."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self.is_sealed = True

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


class Allocator:
    """Memory for tensors: in regions if it is shared, otherwise private."""

    def __init__(self, shares: bool = True, seals: bool = True, checks: bool = True) -> None:
        """``seals``: regions are sealed at once. Otherwise the caller seals them. ``checks`` free memory before."""
        self._shares, self._seals, self._checks = shares, seals, checks
        self.regions: list[Region] = []

    def allocate(self, sizes: Sequence[int]) -> list[Memory]:
        """Return memory of these sizes in bytes. Raises OutOfMemory if the machine or container has less free memory."""
        found = [next((each for region in self.regions if (each := region.reuse(size))), None) for size in sizes]
        missing = sum(size for size, memory in zip(sizes, found, strict=True) if memory is None)
        if self._checks and missing > (free := free_memory_bytes()):
            raise OutOfMemory(
                f"weights: {missing / 1e9:.2f} GB of memory are missing for a version, {free / 1e9:.2f} GB are free; give this "
                "machine or container more memory (a container's limit includes the memory that it shares)"
            )
        return [self._new(size) if memory is None else memory for size, memory in zip(sizes, found, strict=True)]

    def _new(self, size: int) -> Memory:
        if not self._shares:
            return Memory(np.empty(size, np.uint8))
        memory = next((each for region in self.regions if (each := region.take(size))), None)
        if memory is None:
            # Each region is twice as large as the one before, so their number stays small.
            last = len(self.regions[-1].data) if self.regions else 0
            try:
                self.regions.append(Region(max(size, MIN_REGION_BYTES, 2 * last), self._seals))
            except (OSError, ValueError) as error:  # A limit of file sizes or address space.
                log.warning("weights are not shared between processes", reason=str(error))
                self._shares = False
                return self._new(size)
            memory = self.regions[-1].take(size)
            assert memory is not None
        return memory


def machine(directory: SharedDirectory | None = None) -> str:
    """Return the name of the part of this machine in which processes can map each other's memory; empty if none can.

    It consists of the kernel's boot, the ``directory`` or else the namespace of process numbers, and the user. So containers that
    share neither differ.
    """
    boot = _boot()
    try:
        place = os.readlink("/proc/self/ns/pid") if directory is None else directory.identity
    except OSError:
        return ""
    return f"{boot} {place} {os.geteuid()}" if boot else ""


@cache
def _boot() -> str:
    """Return the identity of the kernel's boot; empty if there is no memory that other processes can map."""
    try:
        Region(mmap.PAGESIZE)
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (AttributeError, OSError) as error:  # No memfd: not Linux, an old kernel, or a sandbox that refuses it.
        log.info("weights are not shared between processes", reason=str(error))
        return ""


def region_of(data: Bytes) -> tuple[SharedRegion, int] | None:
    """Return where processes of the same namespace find the memory of ``data``: a region of this process, and the offset there.

    It is there as long as ``data``. None for private memory.
    """
    root: Any = data
    while isinstance(root.base, np.ndarray):
        root = root.base
    owner = root.base.obj if isinstance(root.base, memoryview) else root.base
    if not isinstance(owner, MappedMemory):
        return None
    return SharedRegion(os.getpid(), owner.fd, len(owner)), data.ctypes.data - root.ctypes.data
