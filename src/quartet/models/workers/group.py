"""A group of several ranks over torch.distributed: gloo between CPUs, and NCCL between GPUs.

Commands, and values that the ranks must agree on before they compute, are host tensors and use gloo. A rank that waits for a
command then leaves its GPU idle. Only tensors of the model use NCCL. That part has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quartet.errors import ComputationFailed, ConfigError, QuartetError, ServiceUnavailable
from quartet.models.workers.progress import Progress
from quartet.models.workers.tensor_group import Slicing, TensorGroup
from quartet.models.workers.workers import Result, Workers

MAX_TEXT_BYTES = 256
"""Largest text that ranks exchange."""
BACKGROUND_TIMEOUT = timedelta(days=1)
"""Time limit of a background write of any rank. The calls that wait for it have shorter ones."""


class WorkerGroup(Workers):
    """The ranks of torch.distributed's default process group. Use it from one thread.

    The ranks are ``replicate`` copies of the model, each sharded over the ranks of a copy, of which ``tensor`` consecutive ranks
    compute slices of the same layers. Each group of ``tensor`` ranks computes one share of the data.
    """

    def __init__(
        self, device: torch.device, replicate: int = 1, tensor: int = 1, progress: Progress | None = None
    ) -> None:
        """``replicate`` x ``tensor`` divides the number of ranks. ``progress`` gets this rank's marks."""
        self.progress = progress or Progress()
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.data_rank, self.data_size = self.rank // tensor, self.size // tensor
        # Shards have the name by which peft tells them from slices: an adapter of a slice has the slice's shape.
        sizes = {"replicate": replicate, "fsdp": self.size // (replicate * tensor), "tensor": tensor}
        # Dimensions of one rank would only add process groups.
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.shards: DeviceMesh = mesh["fsdp"]
        """The ranks over which parameters are sharded."""
        self.mesh: DeviceMesh = mesh["replicate", "fsdp"] if replicate > 1 else self.shards
        """The same, and before them the copies, if there are several."""
        self.tensor = TensorGroup(mesh.get_group("tensor")) if tensor > 1 else None
        """The ranks that compute slices of this rank's layers."""
        self._background: dist.ProcessGroup | None = None
        self.release()

    def release(self) -> None:
        self.root: FSDPModule | None = None
        """The module of ``shard_model``, inside which the forward passes run."""
        self.compute_type: torch.dtype | None = None
        """Type in which the model computes, if it is not that of its sharded parameters."""
        self.slicings: dict[torch.Tensor, Slicing] = {}
        """The slicing of the parameters that are sliced over ``tensor``."""
        self.partial: set[torch.Tensor] = set()
        """The parameters that are whole on every rank of ``tensor`` and get only a part of their gradient there."""

    def set_up_thread(self) -> None:
        """Select the GPU of this rank for the thread. FSDP creates its streams on the current GPU, which belongs to a thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute`` with the parameters of the sharded model gathered as it needs them. See ``Workers.forward``."""
        assert self.root is not None
        self.progress.begin_pass()
        if torch.is_grad_enabled():
            return self.root(compute)  # type: ignore[operator, no-any-return]
        # FSDP keeps the buffers of the first pass, and training cannot use buffers from inference mode.
        with torch.inference_mode(False), torch.no_grad():
            result: Result = self.root(compute)  # type: ignore[operator]
            # Without a backward pass, FSDP would use these gathered parameters again after the next step.
            self.root.reshard()
            return result

    def evaluate(self, compute: Callable[[], Result]) -> Result:
        with torch.no_grad():
            return self.forward(compute)

    def end_trial(self) -> None:
        assert self.root is not None
        self.root.reset_iter_state()

    def gathered_bytes(self) -> int:
        """Return the bytes of the parameters outside the layers, two layers, and float32 gradients of one unit."""
        assert self.root is not None
        units = [module for module in self.root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
        counts = [_count(unit) for unit in units]
        largest, ends = max(counts[1:], default=0), counts[0] - sum(counts[1:])
        sharded = [value for value in self.root.parameters() if isinstance(value, DTensor)]  # type: ignore[attr-defined]
        size = (self.compute_type or sharded[0].dtype).itemsize if sharded else 0
        gradients = max(ends, largest) if any(value.requires_grad for value in sharded) else 0
        return size * (ends + 2 * largest) + torch.float32.itemsize * gradients

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.progress.mark()
        total = values.detach().to(torch.float64, copy=True)
        if self.tensor is not None and self.tensor.rank:
            # The first rank counts for all that have computed the same. One sum over all ranks has the same bits on all of them.
            total.zero_()
        dist.all_reduce(total)
        return total

    def smallest(self, value: int) -> int:
        self.progress.mark()
        result = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(result, dist.ReduceOp.MIN)
        return int(result)

    def complete(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        self.progress.mark()
        # Rounded first, so that fewer bytes are sent.
        own: DTensor = value.detach() if self.compute_type is None else value.detach().to(self.compute_type)  # type: ignore[assignment]
        return self.unsliced(value, own.full_tensor())

    def unsliced(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor of which ``value`` is a slice, sliced like ``parameter``."""
        slicing = self.slicings.get(parameter)
        if slicing is None:
            return value
        assert self.tensor is not None
        self.progress.mark()
        return self.tensor.gather(value, slicing)

    def agreed(self, compute: Callable[[], Result]) -> Result:
        self.progress.mark()
        failed = torch.zeros(self.size, dtype=torch.int64)
        try:
            with self.progress.reading():
                result = compute()
        except QuartetError:
            failed[self.rank] = 1
            self.progress.mark()
            dist.all_reduce(failed)
            raise
        self.progress.mark()
        dist.all_reduce(failed)
        if failed.any():
            ranks = ", ".join(map(str, failed.nonzero().flatten().tolist()))
            raise ServiceUnavailable(f"rank {ranks} of {self.size} has failed; see the log of this service")
        return result

    def raise_on_all(self, error: QuartetError | None) -> None:
        if not self.smallest(0 if error is None else -1):
            return
        texts = self.exchange("" if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise ComputationFailed(f"rank {rank} of {self.size}: {text}")

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks. The end of a text of more than MAX_TEXT_BYTES is lost."""
        self.progress.mark()
        own = torch.zeros(MAX_TEXT_BYTES, dtype=torch.uint8)
        data = text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore").encode()
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return [each.cpu().numpy().tobytes().rstrip(b"\0").decode() for each in every]

    def gather_reports(self, report: Sequence[int]) -> list[list[int]]:
        """Return the reports of all ranks on rank 0, on the others nothing. They have equally many numbers of 64 bits.

        May run on another thread than the other methods.
        """
        assert self._background is not None
        own = torch.tensor(report, dtype=torch.int64)
        reports = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, reports, group=self._background)
        return [part.tolist() for part in reports or ()]

    def prepare_background(self) -> None:
        """Create the connections of ``gather_reports``, once. All ranks must call it."""
        if self._background is None:
            self._background = dist.new_group(backend="gloo", timeout=BACKGROUND_TIMEOUT)

    def send(self, kind: int, succeeded: bool, data: bytes) -> None:
        """Send a command to the other ranks, which wait in ``receive``."""
        self._broadcast(data, kind, succeeded)

    def receive(self) -> tuple[int, bool, bytes]:
        """Wait for a command of rank 0: its kind, whether rank 0 succeeded in the command before it, and the data."""
        (kind, succeeded), data = self._broadcast(b"", 0, 0)
        return kind, bool(succeeded), data

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0."""
        self.progress.mark()
        return self._broadcast(data)[1]

    def _broadcast(self, data: bytes, *numbers: int) -> tuple[list[int], bytes]:
        """Return the numbers and data of rank 0. All ranks give equally many numbers."""
        header = torch.tensor([*numbers, len(data)], dtype=torch.int64)
        dist.broadcast(header, 0)
        *numbers_of_0, length = header.tolist()
        values = torch.empty(length, dtype=torch.uint8)
        if length:
            if self.rank == 0:
                values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(values, 0)
        return numbers_of_0, values.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank on rank 0, on the others nothing."""
        self.progress.mark()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64))
        own = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, every)
        return [each[: int(length)].numpy().tobytes() for each, length in zip(every or (), lengths, strict=False)]


def store_connection() -> Store:
    """Return another connection to the store in which the ranks have met, for one thread."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def _count(module: FSDPModule) -> int:
    """Return the number of sharded parameters below ``module``."""
    parameters: list[torch.Tensor] = list(module.parameters())  # type: ignore[attr-defined]
    return sum(value.numel() for value in parameters if isinstance(value, DTensor))


def join_group(
    rank: int,
    size: int,
    address: tuple[str, int],
    descriptor: int | None = None,
    timeout: float = 60.0,
    device: str = "cpu",
    replicate: int = 1,
    tensor: int = 1,
    store: Store | None = None,
    progress: Progress | None = None,
) -> WorkerGroup:
    """Join the process group of ``size`` ranks, as ``rank``. Waits until all have come. Use once per process.

    ``address``: host and port of torch's store. ``descriptor``: the listening socket of that port, in rank 0. ``timeout``:
    seconds after which a collective fails. ``device`` of this rank. ``store``: the store, if it is open. For the others see
    ``WorkerGroup``. Raises ConfigError if this torch has no NCCL.
    """
    own, backend, bound = torch.device(device), "gloo", None
    if own.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError(
                f"a group on GPUs needs NCCL, which torch {torch.__version__} lacks; install torch for CUDA"
            )
        # Before anything may start CUDA on device 0.
        torch.cuda.set_device(own)
        backend, bound = "cpu:gloo,cuda:nccl", own
    if store is None:
        store = TCPStore(*address, size, is_master=rank == 0, master_listen_fd=descriptor)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=bound,
    )
    return WorkerGroup(own, replicate, tensor, progress)
