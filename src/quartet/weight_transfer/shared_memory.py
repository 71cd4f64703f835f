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

from quartet.errors import InvalidRequest, OutOfMemory, ServiceUnavailable
from quartet.system.machine import free_memory_bytes
from quartet.weight_transfer.tensors import Bytes

ALIGNMENT = 64
"""Offsets of tensors are multiples of this number of bytes."""
MIN_REGION_BYTES = 2**26
"""Minimum size of a region. Pages that are never written take no memory."""
_SEALS = 0
if hasattr(os, "memfd_create"):
    # Nobody can resize the memory, and nobody else can map it for writing (F_SEAL_FUTURE_WRITE, which Python does not name).
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Where a process finds a region: descriptor ``fd`` of process ``pid``. ``num_bytes``: size of the region."""

    pid: int
    fd: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A region of another process, in the memory of this one: ``data`` uint8 [num_bytes], read-only."""

    inode: int
    data: Bytes


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

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("quartet-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        self.data: Bytes = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.used = 0
        self.free: dict[int, list[int]] = {}
        """Offsets that are free again, by size in bytes."""

    def take(self, num_bytes: int) -> Memory | None:
        """Return memory of this size; None if there is no place for it."""
        if free := self.free.get(num_bytes):
            offset = free.pop()
        elif self.used + num_bytes <= len(self.data):
            offset, self.used = self.used, self.used + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        else:
            return None
        return Memory(self.data[offset : offset + num_bytes], self, offset)

    def __del__(self) -> None:
        os.close(self.fd)


class Allocator:
    """Memory for tensors: in regions where the system can share memory, otherwise private."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def allocate(self, sizes: Sequence[int]) -> list[Memory]:
        """Return memory of these sizes in bytes. Raises OutOfMemory if the machine or container has less free memory."""
        if not _SEALS:
            return [Memory(np.empty(size, np.uint8)) for size in sizes]
        found = [self._take(size) for size in sizes]
        missing = sum(size for size, memory in zip(sizes, found, strict=True) if memory is None)
        if missing > (free := free_memory_bytes()):
            raise OutOfMemory(
                f"weights: {missing / 1e9:.2f} GB of memory are missing for a version, {free / 1e9:.2f} GB are free; give this "
                "machine or container more memory (a container's limit includes the memory that it shares)"
            )
        return [self._grown(size) if memory is None else memory for size, memory in zip(sizes, found, strict=True)]

    def _take(self, size: int) -> Memory | None:
        return next((memory for region in self._regions if (memory := region.take(size)) is not None), None)

    def _grown(self, size: int) -> Memory:
        memory = self._take(size)
        if memory is None:
            # Each region is twice as large as the one before, so their number stays small.
            last = len(self._regions[-1].data) if self._regions else 0
            self._regions.append(Region(max(size, MIN_REGION_BYTES, 2 * last)))
            memory = self._regions[-1].take(size)
            assert memory is not None
        return memory


@cache
def machine() -> str:
    """Return the name of the part of this machine in which processes can map each other's memory; empty if none can.

    It consists of the kernel's boot and the namespace of process numbers, so containers that do not share it differ.
    """
    if not _SEALS:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return ""


def map_region(region: SharedRegion, mapped: MappedRegion | None = None) -> MappedRegion:
    """Map a region of another process on this machine, read-only, or return ``mapped`` if that is it.

    Raises ServiceUnavailable if this process cannot open it, InvalidRequest if it is not a sealed memfd of this size.
    """
    try:
        # O_NONBLOCK: a pipe with this number must not wait for its other end.
        fd = os.open(f"/proc/{region.pid}/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ServiceUnavailable(f"weights: cannot open the shared memory of process {region.pid}: {error}") from None
    try:
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not stat.S_ISREG(status.st_mode) or seals & _SEALS != _SEALS or status.st_size != region.num_bytes:
            raise InvalidRequest(
                f"weights: descriptor {region.fd} of process {region.pid} is no sealed memory of {region.num_bytes} bytes"
            )
        if mapped is not None and mapped.inode == status.st_ino:
            return mapped
        memory = mmap.mmap(fd, region.num_bytes, prot=mmap.PROT_READ)
        return MappedRegion(status.st_ino, np.frombuffer(memory, np.uint8))
    finally:
        os.close(fd)
