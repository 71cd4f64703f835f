"""A pretended GPU ``cuda:0`` over CPU values, for tests of the GPU path on a machine without a GPU.

Its tensors wrap CPU tensors and compute with them, so results equal those of the CPU. Like CUDA it refuses operations on tensors
of two devices, except copies and scalars. During the capture of a graph it refuses reads by the host and transfers, and records
each operation with the memory that it used. A replay repeats the operations on the same memory. In strict deterministic mode it
refuses operations without a deterministic CUDA kernel, by the list in torch's documentation of ``use_deterministic_algorithms``.
It counts which kernel of attention a GPU would take.

Differences from a GPU: no kernel runs, so rounding, speed, memory and the order of streams are those of the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import flash_attention

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
TRANSFERS = {"aten::_to_copy", "aten::copy_"}
"""Operations that may have tensors of two devices."""
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operations that copy indices from the host themselves."""
HOST_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}
"""Operations whose result, or the shape of it, the host must know."""
NO_DETERMINISTIC_KERNEL = {
    "aten::cumsum",
    "aten::cumprod",
    "aten::kthvalue",
    "aten::median",
    "aten::histc",
    "aten::put_",
}
"""Operations that raise in strict mode, by name. Not complete: those that this code base could call."""
SORTING_KERNEL = (INDEXING - {"aten::index"}) | {"aten::index_add", "aten::index_add_"}
"""Operations whose CUDA kernel sorts the indices, and copies views, in deterministic mode."""
STAND_INS = {flash_attention.FORWARD: flash_attention.forward, flash_attention.BACKWARD: flash_attention.backward}
"""Replacements of kernels that torch has on CUDA only."""


class DeviceError(RuntimeError):
    """An operation that a GPU refuses."""


class GpuTensor(torch.Tensor):
    """A tensor that pretends to be on ``cuda:0``. ``inner`` is the CPU tensor with its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> GpuTensor:
        result: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CPU,  # This torch has no CUDA, which the backward pass would need for a tensor that is really there.
        )
        result.inner = values
        return result

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, *__: Any) -> GpuTensor:
        return GpuTensor(inner["inner"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        more = more or {}
        if function == torch.Tensor.device.__get__:
            return CUDA
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if function == torch.Tensor.is_cpu.__get__:
            return False
        if function is torch.Tensor.numpy:
            raise DeviceError("can't convert cuda:0 device type tensor to numpy")
        if function is torch.Tensor.cpu or (function is torch.Tensor.to and _names_host(*arguments, **more)):
            # A wrapper counts as a CPU tensor in torch, so only a forced copy reaches the dispatcher.
            target = {"device": CPU} if function is torch.Tensor.cpu else {}
            with _current().leaving():
                return _call(torch.Tensor.to, arguments, {**more, **target, "copy": True})
        if function is torch.nn.functional.scaled_dot_product_attention:
            _current().attention_kernels[_attention_kernel(*arguments, **more)] += 1
        if function is torch.Tensor.tolist:
            return arguments[0].cpu().tolist()
        if function in (torch.Tensor.to, torch.Tensor.cuda) and _changes_nothing(*arguments, **more):
            return arguments[0]
        return _call(function, arguments, more)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        gpu = _current()
        return gpu.compute(function, arguments, more or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.inner!r})"


def _call(function: Any, arguments: Any, more: dict[str, Any]) -> Any:
    # The method of the base class would also convert plain results to the subclass.
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **more)


def _names_host(_: Any, *arguments: Any, **more: Any) -> bool:
    """Return whether the arguments of ``to`` name the CPU."""
    return any(
        torch.device(each).type == "cpu" if isinstance(each, (str, torch.device)) else type(each) is torch.Tensor
        for each in (*arguments, *more.values())
    )


def _changes_nothing(_: Any, *arguments: Any, **more: Any) -> bool:
    """Return whether the arguments of ``to`` or ``cuda`` name only the device."""
    return not more and all(isinstance(each, (str, torch.device)) for each in arguments)


def _attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> str:
    """Return the kernel that CUDA takes for ``scaled_dot_product_attention``. "math" keeps all weights of the attention."""
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "efficient" if query.shape[-3] == key.shape[-3] == value.shape[-3] else "math"


@dataclass
class _Operation:
    """A recorded operation: its arguments and results are CPU tensors, at the addresses of the recording."""

    function: Any
    arguments: Any
    more: Any
    results: list[torch.Tensor]

    def replay(self) -> None:
        again = _tensors(self.function(*self.arguments, **self.more))
        for target, source in zip(self.results, again, strict=True):
            # An operation in place, or a view, has changed or shows the memory already.
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


class Graph:
    """A recorded graph, instead of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.replays = 0

    def replay(self) -> None:
        """Repeat the operations on the same memory."""
        self.replays += 1
        with torch.no_grad():
            for operation in self.operations:
                operation.replay()


class Stream:
    """A stream, which runs at once."""

    def __init__(self, device: Any = None) -> None:
        """Create a stream of the only device."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


@dataclass
class PretendedGpu:
    """The state of the device: what it counts, and what it now refuses."""

    captures: list[Graph] = field(default_factory=list)
    attempts: int = 0
    """Captures that began, failed ones included."""
    capture_streams: list[Stream] = field(default_factory=list)
    """Stream of each capture that began."""
    recording_pools: list[Any] = field(default_factory=list)
    """Memory pools of captures that the allocator counts as unfinished. While there are any, it gives back no unused memory."""
    held_pools: list[Any] = field(default_factory=list)
    """Memory pools that cannot be freed: one item for each capture that began, also failed ones."""
    sorting_kernels: int = 0
    """Index writes that ran in deterministic mode."""
    attention_kernels: Counter[str] = field(default_factory=Counter)
    """Calls of attention by kernel: flash, efficient, math, and runs for sequences of different lengths."""
    longest_scan: int = 0
    """Elements of the longest row of a cumulative sum, which one block of threads computes."""
    unordered_kernels: int = 0
    """Backward passes of attention whose order of summation was not fixed."""
    modes: set[int] = field(default_factory=set)
    """Deterministic modes in which operations ran: 0 off, 1 warn, 2 error."""
    emptied: int = 0
    """Calls of ``torch.cuda.empty_cache``."""
    total_bytes: int = 80 * 2**30
    free_bytes: int = 79 * 2**30
    _leaving: bool = False
    _graph: Graph | None = None
    _sync_mode: int | str = 0
    _stream: Stream = field(default_factory=Stream)

    def compute(self, function: Any, arguments: Any, more: dict[str, Any]) -> Any:
        """Compute an operation as the GPU would, or raise DeviceError."""
        name = function.name().partition(".")[0]
        if name in ("aten::to", "aten::item"):
            # In inference mode the composition arrives. Its parts are checked.
            with _Mode(self):
                return function.decompose(*arguments, **more)
        tensors = _tensors((arguments, more))
        on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        requested = more.get("device")
        # torch fills in the device of the wrapper, which is the CPU. So only ``leaving`` says that the result is to be there.
        goes_to_gpu = (on_gpu and not self._leaving) or (
            requested is not None and torch.device(requested).type == "cuda"
        )
        indices = _tensors(arguments[1]) if name in INDEXING else []
        on_host = [leaf for leaf in tensors if not isinstance(leaf, GpuTensor) and leaf.ndim]
        moves_indices = bool(on_host) and all(any(leaf is index for index in indices) for leaf in on_host)
        is_transfer = (name in TRANSFERS and (bool(on_host) or on_gpu != goes_to_gpu)) or moves_indices
        if on_gpu and on_host and not is_transfer:
            raise DeviceError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        if on_gpu or goes_to_gpu:
            self._check(name, is_transfer, any(tensor.is_floating_point() for tensor in tensors))
        if requested is not None:
            more = {**more, "device": CPU}
        more.pop("pin_memory", None)
        plain_arguments, plain_more = _mapped(_values, (arguments, more))
        if name == "aten::cumsum" and on_gpu:
            self.longest_scan = max(self.longest_scan, arguments[0].shape[arguments[1]])
        if name in STAND_INS and on_gpu:
            function = STAND_INS[name]
            self.attention_kernels["runs"] += name == flash_attention.FORWARD
            self.unordered_kernels += name == flash_attention.BACKWARD and torch.get_deterministic_debug_mode() < 2
        results = function(*plain_arguments, **plain_more)
        if not (on_gpu or goes_to_gpu):
            return results
        if self._graph is not None:
            self._graph.operations.append(_Operation(function, plain_arguments, plain_more, _tensors(results)))
        if name == "aten::copy_" and not isinstance(arguments[0], GpuTensor):
            return arguments[0]
        if not goes_to_gpu:
            return results
        known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, GpuTensor)}

        def wrapped(tensor: torch.Tensor) -> torch.Tensor:
            return known[id(tensor)] if id(tensor) in known else GpuTensor(tensor)

        return _mapped(wrapped, results)

    def _check(self, name: str, is_transfer: bool, floating: bool) -> None:
        if name in HOST_READS or is_transfer:
            if self._graph is not None:
                raise DeviceError(f"{name}: operation not permitted when stream is capturing")
            if self._sync_mode in (2, "error"):
                raise DeviceError(f"{name}: called a synchronizing CUDA operation")
        mode = torch.get_deterministic_debug_mode()
        self.modes.add(mode)
        self.sorting_kernels += mode > 0 and name in SORTING_KERNEL
        if mode == 2 and name in NO_DETERMINISTIC_KERNEL and floating:
            raise DeviceError(f"{name} does not have a deterministic implementation")

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Copy to the host inside the context."""
        self._leaving = True
        try:
            yield
        finally:
            self._leaving = False

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        """Record the operations inside the context, instead of ``torch.cuda.graph``.

        As in torch, an error inside leaves the thread on the stream of the capture, and its memory pool in use.
        """
        before, self._stream = self._stream, stream or Stream()
        self._graph = graph
        self.attempts += 1
        self.capture_streams.append(self._stream)
        self.recording_pools.append(pool)
        self.held_pools.append(pool)
        try:
            yield
        finally:
            self._graph = None
        self.recording_pools.remove(pool)
        self._stream = before
        self.captures.append(graph)

    def end_allocate_to_pool(self, device: int, pool: Any) -> None:
        """End the use of a pool by a capture, instead of ``torch._C._cuda_endAllocateToPool``."""
        if pool not in self.recording_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording_pools.remove(pool)

    def set_sync_mode(self, mode: int | str) -> None:
        """Set whether reads by the host raise, instead of ``torch.cuda.set_sync_debug_mode``."""
        self._sync_mode = mode

    def patches(self) -> dict[str, Any]:
        """Return the replacements of functions in ``torch.cuda``."""

        def set_stream(stream: Stream) -> None:
            self._stream = stream

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            before, self._stream = self._stream, stream
            try:
                yield
            finally:
                self._stream = before

        def empty_cache() -> None:
            self.emptied += 1

        nothing, pools = mock.MagicMock(), count(1)
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "device": lambda device: nothing,
            "current_stream": lambda device=None: self._stream,
            "set_stream": set_stream,
            "stream": on_stream,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": self.capture,
            "graph_pool_handle": lambda: (0, next(pools)),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda device=None: None,
            "set_sync_debug_mode": self.set_sync_mode,
            "get_sync_debug_mode": lambda: self._sync_mode,
            "empty_cache": empty_cache,
            "mem_get_info": lambda device=None: (self.free_bytes, self.total_bytes),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
        }

    def is_capturing(self) -> bool:
        """Return whether its stream is being captured, instead of ``torch.Stream.is_capturing``."""
        return self.capturing

    @property
    def capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self._graph is not None

    @property
    def stream(self) -> Stream:
        """The current stream of the only thread."""
        return self._stream


_devices: list[PretendedGpu] = []


def _current() -> PretendedGpu:
    if not _devices:
        raise DeviceError("a GPU tensor outlived its pretended GPU")
    return _devices[-1]


class _Mode(TorchDispatchMode):
    """Mode that creates tensors on the pretended GPU where a function without tensors names it."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        return self._gpu.compute(function, arguments, more or {})


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Make ``cuda:0`` exist inside the context, for the calling thread."""
    gpu = PretendedGpu()
    _devices.append(gpu)
    try:
        with (
            mock.patch.multiple(torch.cuda, **gpu.patches()),
            # A build of torch with CUDA asks the driver, which a machine without a GPU lacks.
            mock.patch.object(torch.accelerator, "current_stream", return_value=gpu),
            mock.patch.object(torch, "tensor", _tensor),
            mock.patch.object(torch._C, "_cuda_endAllocateToPool", gpu.end_allocate_to_pool),
            mock.patch.object(torch._C, "_cuda_releasePool", lambda device, pool: gpu.held_pools.remove(pool)),
            _Mode(gpu),
        ):
            yield gpu
    finally:
        _devices.pop()


_create_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
    """Create a tensor on the host and copy it, as ``torch.tensor`` does without asking the mode."""
    values = _create_tensor(data, **more)
    return values if device is None else values.to(device)


def to_host(model: Any) -> dict[str, torch.Tensor]:
    """Return the state of a model on the pretended GPU as CPU tensors."""
    return {name: _values(value.detach()) for name, value in model.state_dict().items()}


# torch.utils._pytree does the same for every kind of container, and would take half of the time of these tests.


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for item in tree for tensor in _tensors(item)]


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return tuples, lists and dicts with their tensors changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(change, item) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(change, item) for item in tree])
    return tree


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, GpuTensor) else tensor
