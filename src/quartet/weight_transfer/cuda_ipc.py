"""Weights in the memory of a GPU that other processes of the machine open by CUDA's handles (IPC). It has not run on a GPU yet.

The trainer has the newest version there once more, outside of torch's allocator: a handle names the base of an allocation, and
the expandable segments that services use have none. The driver frees the memory with the last process that has it open, after any
kill.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog

from quartet.config.root import Config
from quartet.errors import ServiceUnavailable
from quartet.weight_transfer.messages import HANDLE_BYTES, DeviceRegion, TensorLayout

ALIGNMENT = 256
"""Offsets of tensors are multiples of this number of bytes."""
BLOCK_BYTES = 2**21
"""Sizes of regions are multiples of this number of bytes. A handle of a smaller one would also give access to its neighbours."""
LAZY_ENABLE_PEER_ACCESS, DEFAULT_KIND = 1, 4
"""``cudaIpcMemLazyEnablePeerAccess``, and ``cudaMemcpyDefault``: the addresses say where source and target are."""

log = structlog.get_logger()


class CudaRuntime(Protocol):
    """CUDA's runtime on one device. Every method raises ServiceUnavailable with the name of the call that has failed."""

    def malloc(self, num_bytes: int) -> int:
        """Return the address of new memory, outside of torch's allocator."""

    def free(self, address: int) -> None:
        """Free memory of ``malloc``."""

    def handle(self, address: int) -> bytes:
        """Return the handle of memory of ``malloc``, HANDLE_BYTES, by which other processes open it."""

    def open(self, handle: bytes) -> int:
        """Return the address of memory of another process, on this device or on one to which it has peer access."""

    def close(self, address: int) -> None:
        """Close memory of ``open``."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Start to copy bytes, in the order of the default stream."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was started."""


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Libcudart:
    """The CUDA runtime that torch has loaded. So both have the same current device, and one context.

    ``cuda.bindings``, which torch also depends on, has its own runtime, and names the bytes of a handle differently from release
    to release.
    """

    def __init__(self, device: int, library: Any = None) -> None:
        """``library``: that of torch, by default. Raises OSError if torch has none that is a file of its own."""
        import torch

        self._device, self._torch = device, torch
        self._library = library or ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        with self._torch.cuda.device(self._device):
            error = getattr(self._library, name)(*arguments)
            if error:
                # Otherwise torch would find the error after its next kernel, and blame that.
                self._library.cudaGetLastError()
        if error:
            text = self._library.cudaGetErrorString(error).decode()
            raise ServiceUnavailable(f"weights: {name} on cuda:{self._device}: {text} (error {error})")

    def malloc(self, num_bytes: int) -> int:
        # What torch holds but does not use is not free for others.
        self._torch.cuda.empty_cache()
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return int(address.value or 0)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        size = ctypes.c_size_t(num_bytes)
        self._call("cudaMemcpy", ctypes.c_void_p(target), ctypes.c_void_p(source), size, ctypes.c_int(DEFAULT_KIND))

    def synchronize(self) -> None:
        self._call("cudaDeviceSynchronize")


def cuda_runtime(config: Config, device: int | None) -> CudaRuntime | None:
    """Return the runtime of a process on a CUDA device, or None if it does not share memory of it."""
    if device is None or not config.rollout.share_gpu_memory or not config.rollout.share_weights:
        return None
    try:
        return Libcudart(device)
    except OSError as error:
        log.warning("weights are not shared on the GPU", reason=str(error))
        return None


def offsets_of(layouts: Sequence[TensorLayout]) -> tuple[list[int], int]:
    """Return the place of each tensor in a region, in bytes, and the size of the region."""
    offsets, size = [], 0
    for layout in layouts:
        offsets.append(size)
        size += -(-layout.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(1, -(-size // BLOCK_BYTES)) * BLOCK_BYTES


class DeviceCopy:
    """The newest version of a trainer in memory of its GPU. Not thread-safe.

    ``digest``: that of the version; empty while there is none. ``readers``: streams whose callers may read it; nobody writes
    while there are any.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._address = 0
        self.region: DeviceRegion | None = None
        self.digest, self.readers, self._has_failed = b"", 0, False

    def write(self, layouts: Sequence[TensorLayout], tensors: Iterable[Any]) -> bool:
        """Copy torch tensors on the device, in the order of their ``layouts``. Return False if that has failed, now or before."""
        if self._has_failed:
            return False
        offsets, size = offsets_of(layouts)
        try:
            if self.region is None or self.region.num_bytes != size:
                self.close()
                self._address = self._runtime.malloc(size)
                self.region = DeviceRegion(self._runtime.handle(self._address), size)
            self._runtime.synchronize()
            for offset, tensor in zip(offsets, tensors, strict=True):
                if tensor.nbytes:
                    self._runtime.copy(self._address + offset, tensor.detach().contiguous().data_ptr(), tensor.nbytes)
            self._runtime.synchronize()
        except ServiceUnavailable as error:
            log.warning("weights are not shared on the GPU", reason=str(error), remedy="free memory of the GPU")
            self._has_failed = True
            self.close()
        return not self._has_failed

    def close(self) -> None:
        """Free the memory, unless another process may read it: then it is freed with this process."""
        address, self._address, self.region, self.digest = self._address, 0, None, b""
        if address and not self.readers:
            with suppress(ServiceUnavailable):
                self._runtime.free(address)


class OpenedCopy:
    """A version in memory of another process's GPU, which this process has opened."""

    def __init__(self, runtime: CudaRuntime, region: DeviceRegion, layouts: Sequence[TensorLayout]) -> None:
        """Raises ServiceUnavailable if it cannot be opened."""
        offsets, size = offsets_of(layouts)
        if size != region.num_bytes:
            raise ServiceUnavailable(f"weights: expected a region of {size} bytes on the GPU, got {region.num_bytes}")
        self._runtime, self._address = runtime, runtime.open(region.handle)
        self._places = {
            layout.name: (self._address + offset, layout.num_bytes)
            for layout, offset in zip(layouts, offsets, strict=True)
        }

    def copy(self, name: str, target: Any) -> None:
        """Copy a tensor into ``target``, a contiguous torch tensor of its size on this process's device, in the order of streams.

        Raises ServiceUnavailable.
        """
        source, num_bytes = self._places[name]
        if num_bytes:
            self._runtime.copy(target.data_ptr(), source, num_bytes)

    def close(self) -> None:
        """Close the memory after all copies."""
        self._places = {}
        with suppress(ServiceUnavailable):
            self._runtime.synchronize()
            self._runtime.close(self._address)
