"""Commands: rank 0 passes each request that needs all ranks to the others, as the bytes of its protobuf message."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from quartet import codec
from quartet.config import ParallelConfig
from quartet.errors import QuartetError, ServiceFailed
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rpc.commands import CommandHandler, Commands, Result
from quartet.services.workers.processes import LOOPBACK, RankProcess, loopback_interface

if TYPE_CHECKING:
    from quartet.models.workers.group import WorkerGroup

STOP = 0
"""Number of the command that ends a rank. Those of ``codec.command_to_bytes`` start at 1."""
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
        number, data = codec.command_to_bytes(kind, request)
        self._group.send(number, self._succeeded, data)
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
            kind, request = codec.command_from_bytes(number, data)
            try:
                handlers[kind](request)
                succeeded = True
            except QuartetError as error:
                succeeded = False
                log.warning("command refused", command=kind, error=str(error))


def join(process: RankProcess, parallel: ParallelConfig, device: str = "cpu") -> tuple[Workers, Commands]:
    """Join the group of this process's ranks, and return it with its commands. Waits until all have come. Imports torch.

    ``parallel``: how the ranks divide the model. ``device`` of this rank. Raises ConfigError.
    """
    if process.size == 1:
        return SINGLE, Commands()
    from quartet.models.workers.group import join_group

    descriptor = None
    if process.port is not None:
        # Otherwise gloo listens at the address of the host name, and NCCL at that of any interface.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback_interface()
        descriptor = process.listener.detach() if process.listener is not None else None
    address = None if process.port is None else (LOOPBACK, process.port)
    group = join_group(
        process.rank,
        process.size,
        address,
        descriptor,
        GROUP_TIMEOUT_SECONDS,
        device,
        replicate=parallel.replicate,
        tensor=parallel.tensor,
    )
    return group, GroupCommands(group)
