"""A pretended CUDA runtime library: memory of a GPU is memory of this process, and both sides of a handle are in it.

It has the C functions that ``cuda_ipc.Libcudart`` calls, which take arguments of ctypes. It refuses what a driver refuses or
leaves undefined: freeing memory that is open, an unknown handle, and copies beyond the memory.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

INVALID, MEMORY, SUCCESS = 1, 2, 0
TEXTS = {INVALID: b"invalid argument", MEMORY: b"out of memory"}


class PretendedCudart:
    """The library. ``fails``: errors of functions by name. ``calls``: how often each has succeeded."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.calls, self.open = Counter[str](), Counter[int]()
        self.allocated: dict[int, Any] = {}
        self.last_error = SUCCESS
        for name in ("Malloc", "Free", "IpcGetMemHandle", "IpcOpenMemHandle", "IpcCloseMemHandle", "Memcpy"):
            setattr(self, f"cuda{name}", self._function(f"cuda{name}", getattr(self, f"_{name}")))
        self.cudaDeviceSynchronize = self._function("cudaDeviceSynchronize", lambda: SUCCESS)
        # A function of a library has attributes.
        self.cudaGetErrorString = lambda error: TEXTS[error]

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, SUCCESS
        return error

    def _function(self, name: str, work: Any) -> Any:
        def call(*arguments: Any) -> int:
            error: int = self.fails.get(name) or work(*arguments)
            self.last_error = error or self.last_error
            self.calls[name] += not error
            return error

        return call

    def memory(self, address: int) -> Any:
        """Return the buffer at an address."""
        return self.allocated[address]

    def _Malloc(self, pointer: Any, size: ctypes.c_size_t) -> int:
        buffer = ctypes.create_string_buffer(size.value)
        pointer._obj.value = ctypes.addressof(buffer)
        self.allocated[pointer._obj.value] = buffer
        return SUCCESS

    def _Free(self, address: ctypes.c_void_p) -> int:
        if address.value not in self.allocated or self.open[address.value]:
            return INVALID
        del self.allocated[address.value]
        return SUCCESS

    def _IpcGetMemHandle(self, handle: Any, address: ctypes.c_void_p) -> int:
        if address.value not in self.allocated:
            return INVALID
        handle._obj.reserved[:] = address.value.to_bytes(8, "little") * 8
        return SUCCESS

    def _IpcOpenMemHandle(self, pointer: Any, handle: Any, flags: ctypes.c_uint) -> int:
        address = int.from_bytes(bytes(handle.reserved[:8]), "little")
        if address not in self.allocated or self.open[address] or flags.value != 1:
            return INVALID
        self.open[address] += 1
        pointer._obj.value = address
        return SUCCESS

    def _IpcCloseMemHandle(self, address: ctypes.c_void_p) -> int:
        if not self.open[address.value or 0]:
            return INVALID
        self.open[address.value or 0] -= 1
        return SUCCESS

    def _Memcpy(self, target: Any, source: Any, size: ctypes.c_size_t, kind: ctypes.c_int) -> int:
        end = size.value
        places = [
            (place.value, start, len(buffer)) for place in (target, source) for start, buffer in self.allocated.items()
        ]
        inside = [place + end <= start + length for place, start, length in places if start <= place < start + length]
        if kind.value != 4 or not inside or not all(inside):
            return INVALID
        ctypes.memmove(target, source, end)
        return SUCCESS
