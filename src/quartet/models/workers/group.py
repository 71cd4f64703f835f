"""A group of several ranks over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from quartet.errors import ServiceFailed
from quartet.models.workers.workers import Result, Workers


class WorkerGroup(Workers):
    """The ranks of torch.distributed's default process group. Use it from one thread.

    ``mesh`` has one dimension, over which parameters are sharded.
    """

    def __init__(self, device: torch.device, root: FSDPModule | None = None) -> None:
        """``root``: the module of ``shard_model``, inside which the forward passes run."""
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))
        self.root = root

    def forward(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute`` with the parameters of the sharded model gathered as it needs them. See ``Workers.forward``."""
        assert self.root is not None
        if torch.is_grad_enabled():
            return self.root(compute)  # type: ignore[operator, no-any-return]
        # FSDP keeps the buffers of the first pass, and training cannot use buffers from inference mode.
        with torch.inference_mode(False), torch.no_grad():
            result: Result = self.root(compute)  # type: ignore[operator]
            # Without a backward pass, FSDP would use these gathered parameters again after the next step.
            self.root.reshard()
            return result

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """See ``Workers.sum``."""
        total = values.detach().to(self.device, torch.float64, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def smallest(self, value: int) -> int:
        """See ``Workers.smallest``."""
        result = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(result, dist.ReduceOp.MIN)
        return int(result)

    def check(self, error: Exception | None) -> None:
        """See ``Workers.check``."""
        failed = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        failed[self.rank] = error is not None
        dist.all_reduce(failed)
        if error is not None:
            raise error
        if failed.any():
            ranks = ", ".join(map(str, failed.nonzero().flatten().tolist()))
            raise ServiceFailed(f"rank {ranks} of {self.size} has failed; see the log of this service")


def join_group(store: Store | None, rank: int, size: int, device: torch.device, timeout: float) -> None:
    """Join the process group of ``size`` ranks, as ``rank``. Without a ``store``, torchrun's environment variables name it.

    ``timeout``: seconds after which a collective fails. Use once per process.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=None if store is not None else "env://",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
