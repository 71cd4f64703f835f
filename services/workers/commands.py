"""Commands: rank 0 passes each request that needs all ranks to the others, as the bytes of its protobuf message."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from quartet import codec
from quartet.config import Config, ServiceConfig, is_loopback
from quartet.errors import OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rpc.commands import CommandHandler, Commands, Result
from quartet.rpc.status_codes import domain_error
from quartet.services.workers.processes import RankProcess, interface_towards
from quartet.services.workers.watchdog import Failure, Watchdog

if TYPE_CHECKING:
    from quartet.models.workers.group import WorkerGroup

STOP = 0
"""Number of the command that ends a rank. Those of ``codec.command_to_bytes`` start at 1."""
GROUP_TIMEOUT_SECONDS = 365 * 86400.0
"""Time limit of a collective. Ranks wait for a command for as long as there is none, and the watchdog ends other waits."""
END_SECONDS = 5.0
"""Time that a rank with an error may take to publish it and to end."""
POLL_SECONDS = 0.1

log = structlog.get_logger()


class GroupCommands(Commands):
    """The commands of a group. Rank 0 calls ``run``, the others ``follow``."""

    def __init__(self, group: WorkerGroup, process: RankProcess, watchdog: Watchdog) -> None:
        self._group, self._process, self._watchdog = group, process, watchdog
        self._succeeded = True
        self._failed = Failure()

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Return why only a restart of the group helps: a rank has ended, hangs, or has computed something else. Never waits."""
        if self._failed.text:
            pass
        elif end := self._process.failure():
            error = self._watchdog.error(self._process.ended)
            self._failed = Failure(f"{end}: {error.text}" if error.text else end, error.kind)
        elif hung := self._watchdog.failure():
            self._failed = Failure(hung)
        return self._failed.text

    def run(self, kind: str, request: Any, work: Callable[[], Result]) -> Result:
        """See ``Commands.run``. An error that only some ranks can have makes this process fail."""
        if self.failure:
            raise _error_of(self._failed)
        number, data = codec.command_to_bytes(kind, request)
        self._group.progress.begin(kind)
        try:
            self._group.send(number, self._succeeded, data)
            result = work()
        except QuartetError:
            self._succeeded = False
            raise
        except BaseException as error:
            cause = self._lost_rank()
            if cause.text:
                self._failed = cause
                raise _error_of(cause) from error
            known = domain_error(error) or error
            text = f"{kind}: {type(known).__name__} on rank 0 of {self._group.size}: {known}"
            self._failed = Failure(text, _kind(known))
            raise
        finally:
            self._group.progress.end()
        self._succeeded = True
        return result

    def _lost_rank(self) -> Failure:
        """Return which rank was lost, and so has ended the collective of this one."""
        deadline = time.monotonic() + END_SECONDS
        while self._process.children and not self.failure and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._failed if self.failure or self._process.children else self._watchdog.lost()

    def stop(self) -> None:
        """End the other ranks. Call it when no command runs."""
        if not self.failure:
            self._group.send(STOP, self._succeeded, b"")

    @contextmanager
    def watched_load(self, end: Callable[[Exception], None]) -> Iterator[None]:
        """Name the rank that ends while rank 0 loads the model. Raises ServiceFailed or OutOfMemory.

        ``end`` ends this process. It is called on another thread if the load waits for a rank that has ended.
        """
        loaded = threading.Event()

        def watch() -> None:
            while not loaded.wait(POLL_SECONDS):
                # The closed connections of gloo end the load, but those of NCCL do not.
                if self.failure:
                    if not loaded.wait(END_SECONDS):
                        end(_error_of(self._failed))
                    return

        threading.Thread(target=watch, name="watchdog of the load", daemon=True).start()
        try:
            try:
                yield
            finally:
                loaded.set()
        except BaseException as error:
            # Other domain errors are those of rank 0.
            if isinstance(error, QuartetError) and not isinstance(error, ServiceUnavailable):
                raise
            cause = self._lost_rank()
            if cause.text:
                raise _error_of(cause) from error
            raise

    @contextmanager
    def published_error(self) -> Iterator[None]:
        """Tell rank 0 the error that ends this rank."""
        try:
            yield
        except BaseException as error:
            known = domain_error(error) or error
            self._group.progress.fail(f"{type(known).__name__}: {known}", _kind(known))
            self._watchdog.publish()
            raise

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
            kind, request = codec.command_from_bytes(number, data)
            self._group.progress.begin(kind)
            try:
                handlers[kind](request)
                succeeded = True
            except QuartetError as error:
                succeeded = False
                log.warning("command refused", command=kind, error=str(error))
            on_idle()
            self._group.progress.end()


def _kind(error: BaseException) -> str:
    """Return the class of an error in ``quartet.errors``, or ""."""
    return type(error).__name__ if isinstance(error, QuartetError) else ""


def _error_of(failure: Failure) -> QuartetError:
    """Return the error of the calls to a group that has failed. A restart does not help against too little memory."""
    return (OutOfMemory if failure.kind == OutOfMemory.__name__ else ServiceFailed)(failure.text)


def join(process: RankProcess, service: ServiceConfig, device: str, config: Config) -> tuple[Workers, Commands]:
    """Join the group of this process's ranks, and return it with its commands. Waits until all have come. Imports torch.

    ``service`` of the group, and ``device`` of this rank. Raises ConfigError, and ServiceUnavailable if a rank does not come.
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
    return group, GroupCommands(group, process, watchdog)
