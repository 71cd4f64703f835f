"""Commands: rank 0 passes each request that needs all ranks to the others, as the bytes of its protobuf message."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from quartet.codec.updates import command_from_bytes, command_to_bytes
from quartet.config.deployment import ServiceConfig
from quartet.config.root import Config
from quartet.config.section import is_loopback
from quartet.contract.domain_errors import domain_error
from quartet.errors import QuartetError, ServiceFailed
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rpc.base_servicers import CommandHandler, Commands, Result
from quartet.services.ranks.processes import RankProcess, interface_towards
from quartet.services.ranks.watch import Failure, GroupFailures, Watchdog, error_of, kind_of

if TYPE_CHECKING:
    from quartet.models.workers.group import WorkerGroup

STOP = 0
"""Number of the command that ends a rank. Those of ``command_to_bytes`` start at 1."""
GROUP_TIMEOUT_SECONDS = 365 * 86400.0
"""Time limit of a collective. Ranks wait for a command for as long as there is none, and the watchdog ends other waits."""

log = structlog.get_logger()


class GroupCommands(Commands):
    """The commands of a group. Rank 0 calls ``run``, the others ``follow``."""

    def __init__(self, group: WorkerGroup, failures: GroupFailures) -> None:
        self._group, self._failures, self.size = group, failures, group.size
        self._succeeded = True

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Return why only a restart of the group helps: a rank has ended, hangs, or has computed something else. Never waits."""
        return self._failures.poll().text

    def run(self, kind: str, request: Any, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank. An error that only some ranks can have makes this process fail."""
        if self.failure:
            raise error_of(self._failures.poll())
        number, data = command_to_bytes(kind, request)
        self._group.progress.begin(kind)
        try:
            self._group.send(number, self._succeeded, data)
            result = work()
        except QuartetError:
            self._succeeded = False
            raise
        except BaseException as error:
            cause = self._failures.lost_rank()
            if cause.text:
                self._failures.record(cause)
                raise error_of(cause) from error
            known = domain_error(error) or error
            text = f"{kind}: {type(known).__name__} on rank 0 of {self._group.size}: {known}"
            self._failures.record(Failure(text, kind_of(known)))
            raise
        finally:
            self._group.progress.end()
        self._succeeded = True
        return result

    def stop(self) -> None:
        """End the other ranks. Call it when no command runs."""
        if not self.failure:
            self._group.send(STOP, self._succeeded, b"")

    def follow(self, handlers: Mapping[str, CommandHandler], on_idle: Callable[[], object] = lambda: None) -> None:
        """Run the commands of rank 0 until it ends this process. Raises any error but those that all ranks have alike.

        ``on_idle`` is called after every command.
        """
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
            kind, request = command_from_bytes(number, data)
            self._group.progress.begin(kind)
            try:
                handlers[kind](request)
                succeeded = True
            except QuartetError as error:
                succeeded = False
                log.warning("command refused", command=kind, error=str(error))
            on_idle()
            self._group.progress.end()


def join(
    process: RankProcess, service: ServiceConfig, device: str, config: Config, failures: GroupFailures
) -> tuple[Workers, Commands]:
    """Join the group of this process's ranks, and return it with its commands. Waits until all have come. Imports torch.

    ``service`` of the group, and ``device`` of this rank. ``failures`` gets the watchdog as soon as the ranks have met.
    Raises ConfigError, and ServiceUnavailable if a rank does not come.
    """
    if process.size == 1:
        return SINGLE, Commands()
    from quartet.models.workers.group import join_group
    from quartet.models.workers.progress import Progress
    from quartet.models.workers.rendezvous import StoreAddress, rendezvous

    listener = process.listener.detach() if process.listener is not None else None
    address = StoreAddress(process.host, process.port, process.serves_store, listener)
    # By default, gloo listens at the address of the host name, and NCCL at that of any interface.
    interface = interface_towards(process.host)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface and (is_loopback(process.host) or variable not in os.environ):
            os.environ[variable] = interface
    progress = Progress()
    store, exchange = rendezvous(address, process.rank, process.size, progress.report, config.timeouts.load_seconds)
    hang_timeout = config.recovery.hang_timeout_seconds
    watchdog = Watchdog(exchange, process.rank, process.size, progress.report, hang_timeout)
    failures.watch(progress, watchdog)
    group = join_group(
        process.rank,
        process.size,
        (address.host, address.port),
        timeout=GROUP_TIMEOUT_SECONDS,
        device=device,
        replicate=service.parallel.replicate,
        tensor=service.parallel.tensor,
        store=store,
        progress=progress,
    )
    return group, GroupCommands(group, failures)
