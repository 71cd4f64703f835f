"""A model role: a core that computes, and the compute thread that it computes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from quartet.rpc.compute import ComputeThread
from quartet.types import ServiceStatus


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
        return replace(self.core.status(), threads=self._threads, busy_seconds=self.compute.busy_seconds())

    def close(self) -> None:
        """Waits for the work in hand."""
        self.compute.close()
