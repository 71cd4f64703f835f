"""A model role: a core that computes, and the compute thread that it computes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import grpc

from quartet.errors import DeadlinePassed, ServiceBusy
from quartet.rpc.compute_thread import ComputeThread, remaining_time
from quartet.rpc.limits import MAX_PENDING_SAVES
from quartet.types import SavedFile, ServiceStatus


class Core(Protocol):
    """A service's own logic, callable without gRPC."""

    def status(self) -> ServiceStatus:
        """What the role says of itself; must not wait for model work."""


AnyCore = TypeVar("AnyCore", bound=Core)


class ModelRole(Generic[AnyCore]):
    """What the four servicers share. Roles of one process share its compute thread."""

    def __init__(self, core: AnyCore, compute: ComputeThread, threads: int) -> None:
        self.core = core
        self.compute = compute
        self._threads = threads

    def status(self) -> ServiceStatus:
        """The core's status, with what the compute thread measured."""
        return replace(
            self.core.status(),
            threads=self._threads,
            busy_seconds=self.compute.busy_seconds(),
            work_pending=self.compute.pending(),
        )

    def abandoned(self) -> tuple[str, float]:
        """As ``ComputeThread.abandoned``."""
        return self.compute.abandoned()

    def close(self) -> None:
        """Waits for the work in hand."""
        self.compute.close()


class TrainedRole(ModelRole[AnyCore]):
    """A role whose model learns. A save stops its model work only while what is to be written is copied."""

    def __init__(self, core: AnyCore, compute: ComputeThread, threads: int, cut_off: Callable[[], bool]) -> None:
        """``cut_off``: whether the core cannot reach the rollout buffer; must not wait for it."""
        super().__init__(core, compute, threads)
        self._cut_off = cut_off
        self._places = threading.BoundedSemaphore(MAX_PENDING_SAVES)
        # There is memory for one copy, and no two saves write at the same place.
        self._saving = threading.Lock()

    def status(self) -> ServiceStatus:
        """The core's status, with what the compute thread measured, and whether the buffer can be reached."""
        return replace(super().status(), buffer_unreachable=self._cut_off())

    def save(
        self, context: grpc.ServicerContext, snapshot: Callable[[], tuple[Callable[[], list[SavedFile]], int]]
    ) -> tuple[list[SavedFile], int]:
        """Takes a snapshot on the compute thread, and writes it on this thread, while the compute thread goes on.

        ``snapshot`` gives what writes it, and the policy version; so does this, with the files instead. One save at a time.
        Raises ServiceBusy when too many wait already, otherwise as ComputeThread.run, and what ``snapshot`` and writing raise.
        """
        if not self._places.acquire(blocking=False):
            raise ServiceBusy(f"save: {MAX_PENDING_SAVES} saves wait already; send fewer at once")
        try:
            if not self._saving.acquire(timeout=max(remaining_time(context), 0.0)):
                raise DeadlinePassed("save: the deadline passed while an earlier save was written")
            try:
                write, version = self.compute.run("save", context, lambda _: snapshot())
                return write(), version
            finally:
                self._saving.release()
        finally:
            self._places.release()
