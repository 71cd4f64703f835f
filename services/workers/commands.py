"""Commands: rank 0 passes each request that needs all ranks to the others, as the bytes of its protobuf message."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from quartet.errors import QuartetError, ServiceFailed
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rpc.commands import CommandHandler, Commands, Result
from quartet.services.workers.processes import LOOPBACK, RankProcess, loopback_interface

if TYPE_CHECKING:
    from quartet.models.workers.group import WorkerGroup

STOP = 0
KINDS = ("stop", "update", "save", "restore", "log_probs", "values")
"""Commands, by their number on the wire."""
GROUP_TIMEOUT_SECONDS = 365 * 86400.0
"""Time limit of a collective. Ranks wait for a command for as long as there is none."""

log = structlog.get_logger()


class GroupCommands(Commands):
    """The commands of a group. Rank 0 calls ``run``, the others ``follow``."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._succeeded = True

    def run(self, kind: str, request: Any, work: Callable[[], Result]) -> Result:
        """See ``Commands.run``. An error that only some ranks can have makes this process fail."""
        if self.failure:
            raise ServiceFailed(self.failure)
        self._group.send(KINDS.index(kind), self._succeeded, request.SerializeToString())
        try:
            result = work()
        except QuartetError:
            self._succeeded = False
            raise
        except BaseException as error:
            self.failure = f"{kind}: {type(error).__name__} on rank 0 of {self._group.size}: {error}"
            raise
        self._succeeded = True
        return result

    def stop(self) -> None:
        """End the other ranks. Call it when no command runs."""
        if not self.failure:
            self._group.send(STOP, self._succeeded, b"")

    def follow(self, handlers: Mapping[str, CommandHandler]) -> None:
        """Run the commands of rank 0 until it ends this process. Raises any error but those that all ranks have alike."""
        succeeded = True
        while True:
            number, succeeded_on_first, data = self._group.receive()
            if succeeded_on_first != succeeded:
                raise ServiceFailed(
                    f"rank {self._group.rank}: the command before succeeded here: {succeeded}, on rank 0: {succeeded_on_first}; "
                    "the ranks must compute the same"
                )
            if number == STOP:
                return
            try:
                handlers[KINDS[number]](data)
                succeeded = True
            except QuartetError as error:
                succeeded = False
                log.warning("command refused", command=KINDS[number], error=str(error))


def join(process: RankProcess) -> tuple[Workers, Commands]:
    """Join the group of this process's ranks, and return it with its commands. Waits until all have come. Imports torch."""
    if process.size == 1:
        return SINGLE, Commands()
    import torch
    from torch._C._distributed_c10d import TCPStore

    from quartet.models.workers.group import WorkerGroup, join_group

    store = None
    if process.port is not None:
        # Otherwise gloo listens at the address of the host name.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        descriptor = process.listener.detach() if process.listener is not None else None
        store = TCPStore(LOOPBACK, process.port, process.size, is_master=process.rank == 0, master_listen_fd=descriptor)
    device = torch.device("cpu")
    join_group(store, process.rank, process.size, device, GROUP_TIMEOUT_SECONDS)
    group = WorkerGroup(device)
    return group, GroupCommands(group)
