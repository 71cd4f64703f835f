"""Regions of another process that this process maps, on Linux. ``shared_memory`` has the other side."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from quartet.errors import InvalidRequest, ServiceUnavailable
from quartet.weight_transfer.descriptors import SharedDirectory, receive_descriptors
from quartet.weight_transfer.shared_memory import SEALS, SIZE_SEALS, MappedMemory, SharedRegion
from quartet.weight_transfer.tensors import Bytes


class MappedRegions:
    """Regions of another process, mapped read-only.

    They stay mapped for its next versions, because new mappings cost half as much time as a copy. They go when that process
    ends, and when those of another process are mapped: so the memory of a process that has ended is free at once.
    """

    def __init__(self, directory: SharedDirectory | None = None) -> None:
        """``directory``: that of the sockets of processes in other containers."""
        self._directory = directory
        self._lock = threading.Lock()
        self._process = ""
        # By descriptor, and by device and inode: those belong to a memfd as long as it is mapped.
        self._mapped: dict[tuple[int, int, int], Bytes] = {}
        self._watch: _Watch | None = None

    def map(self, regions: Sequence[SharedRegion]) -> list[Bytes]:
        """Return regions of one process: uint8 [num_bytes] of each. Call it on one thread at a time.

        Raises ServiceUnavailable if this process cannot open or map one, InvalidRequest if one is not a sealed memfd of its size,
        or they are of several processes.
        """
        process = process_of(regions)
        try:
            with ExitStack() as stack:
                descriptors, end = self._descriptors(regions, stack)
                if process != self._process:
                    self.clear()
                    self._keep(process, end)
                kept = dict(self._mapped)
                found = []
                for region in regions:
                    key = _key(region, descriptors)
                    if key not in kept:
                        kept[key] = _map(region, descriptors[region.fd])
                    found.append(kept[key])
        except (OSError, ValueError, OverflowError) as error:
            self.clear()
            raise ServiceUnavailable(f"weights: cannot map the shared memory of {process}: {error}") from None
        with self._lock:
            # Only while something ends the mappings with the process.
            if self._watch is not None:
                self._mapped = kept
        return found

    def clear(self) -> None:
        """Keep no mapping. Arrays that are in use stay valid."""
        with self._lock:
            self._forget()

    def _keep(self, process: str, end: int | None) -> None:
        """Keep the mappings of a process until ``end`` is readable. Without effect if there are too many files or threads."""
        if end is None:
            return
        try:
            watch = _Watch(end)
        except OSError:
            return
        with self._lock:
            self._process, self._watch = process, watch
        try:
            threading.Thread(target=watch.wait, args=(self._ended,), name="weight mappings", daemon=True).start()
        except RuntimeError:
            self.clear()
            watch.close()

    def _ended(self, watch: _Watch) -> None:
        with self._lock:
            if self._watch is watch:
                self._forget()

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch, self._process, self._mapped = None, "", {}

    def _descriptors(self, regions: Sequence[SharedRegion], stack: ExitStack) -> tuple[Mapping[int, int], int | None]:
        """Return open descriptors by their numbers in the other process, and one that becomes readable when it ends, if any.

        The stack closes them. Raises OSError, ServiceUnavailable.
        """
        name, pid = regions[0].socket, regions[0].pid
        if any((region.socket, region.pid) != (name, pid) for region in regions):
            raise InvalidRequest("weights: expected regions of one process")
        if name:
            if self._directory is None:
                raise OSError("it is shared through a directory that this process does not have")
            connection, descriptors = receive_descriptors(self._directory, name)
            stack.callback(connection.close)
            for fd in descriptors.values():
                stack.callback(os.close, fd)
            return descriptors, connection.fileno()
        end = None
        # Before the others are opened: so they are of the same process, and not of a later one with this number.
        with contextlib.suppress(OSError, AttributeError, OverflowError):
            end = os.pidfd_open(pid)
            stack.callback(os.close, end)
        descriptors = {}
        for region in regions:
            descriptors[region.fd] = _open(region, os.O_RDONLY)
            stack.callback(os.close, descriptors[region.fd])
        return descriptors, end


class _Watch:
    """Waits until a descriptor is readable, or until it is stopped."""

    def __init__(self, end: int) -> None:
        """Raises OSError."""
        self._end = os.dup(end)
        try:
            self._stopped, self._stop = socket.socketpair()
        except BaseException:
            os.close(self._end)
            raise

    def wait(self, ended: Callable[[_Watch], None]) -> None:
        """Wait, and call ``ended`` if the descriptor is readable."""
        try:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            poll.register(self._stopped, select.POLLIN)
            if self._end in {fd for fd, _ in poll.poll()}:
                ended(self)
        finally:
            self.close()

    def stop(self) -> None:
        """End the wait."""
        self._stop.close()

    def close(self) -> None:
        """Close the descriptors. Call it after the wait."""
        os.close(self._end)
        self._stopped.close()


def process_of(regions: Sequence[SharedRegion]) -> str:
    """Return a name for the process that has these regions."""
    return f"the process with socket {regions[0].socket}" if regions[0].socket else f"process {regions[0].pid}"


def map_for_writing(region: SharedRegion) -> Bytes:
    """Map a region of another process for writing, before that process seals it: uint8 [num_bytes].

    Raises ServiceUnavailable if this process cannot open or map it, InvalidRequest if it is not a memfd of this size.
    """
    return _map_once(region, mmap.ACCESS_WRITE)


def map_copy_on_write(region: SharedRegion) -> Bytes:
    """Map a region of another process: uint8 [num_bytes]. What is written to it stays in this process.

    Raises ServiceUnavailable if this process cannot open or map it, InvalidRequest if it is not a sealed memfd of this size.
    """
    return _map_once(region, mmap.ACCESS_COPY)


def _map_once(region: SharedRegion, access: int) -> Bytes:
    writes = access == mmap.ACCESS_WRITE
    try:
        fd = _open(region, os.O_RDWR if writes else os.O_RDONLY)
        try:
            _check(region, fd, SIZE_SEALS if writes else SEALS)
            return np.frombuffer(mmap.mmap(fd, region.num_bytes, access=access), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as error:
        raise ServiceUnavailable(f"weights: cannot map the shared memory of {process_of([region])}: {error}") from None


def _open(region: SharedRegion, mode: int) -> int:
    """Open the descriptor of a region in /proc. Raises OSError."""
    # O_NONBLOCK: a pipe with this number must not wait for its other end.
    return os.open(f"/proc/{region.pid}/fd/{region.fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _check(region: SharedRegion, fd: int, expected: int = SEALS) -> os.stat_result:
    """Return the status of a descriptor. Raises OSError, or InvalidRequest unless it is the memory of a region."""
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not stat.S_ISREG(status.st_mode) or seals & expected != expected or status.st_size != region.num_bytes:
        raise InvalidRequest(
            f"weights: descriptor {region.fd} of {process_of([region])} is no sealed memory of {region.num_bytes} bytes"
        )
    return status


def _key(region: SharedRegion, descriptors: Mapping[int, int]) -> tuple[int, int, int]:
    """Return what identifies a region in its process. Raises OSError, InvalidRequest."""
    fd = descriptors.get(region.fd)
    if fd is None:
        raise OSError(f"it does not share descriptor {region.fd}")
    status = _check(region, fd)
    return region.fd, status.st_dev, status.st_ino


def _map(region: SharedRegion, fd: int) -> Bytes:
    """Map a region. Raises OSError, ValueError."""
    memory = MappedMemory(fd, region.num_bytes, access=mmap.ACCESS_READ)
    memory.fd = os.dup(fd)
    # A process that this one forks must not keep the memory.
    memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)
