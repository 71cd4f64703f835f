"""`quartet pause|resume|stop RUN`: what a user asks of a run that is going on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from quartet.errors import ConfigError, ServiceUnavailable
from quartet.rpc.channels import Peer
from quartet.telemetry.run_files import RunFiles
from quartet.types import Role
from quartet.v1 import orchestrator_pb2, orchestrator_pb2_grpc

TIMEOUT = 10.0
"""Seconds that the orchestrator has to answer; it does so at once, also during a step."""

console = Console()
Ask = Callable[[Peer, orchestrator_pb2_grpc.OrchestratorServiceStub], object]


def pause(run: Path) -> None:
    """The run waits after the step in hand."""
    _ask(run, lambda peer, stub: peer.call(stub.Pause, orchestrator_pb2.PauseRequest(), TIMEOUT, "Pause"))
    console.print(
        f"{run}: pauses after the step in hand; quartet resume {run} goes on", highlight=False, soft_wrap=True
    )


def resume(run: Path) -> None:
    """The run goes on."""
    _ask(run, lambda peer, stub: peer.call(stub.Resume, orchestrator_pb2.ResumeRequest(), TIMEOUT, "Resume"))
    console.print(f"{run}: goes on", highlight=False, soft_wrap=True)


def stop(run: Path) -> None:
    """The run ends after the step in hand, its policy saved."""
    _ask(run, lambda peer, stub: peer.call(stub.Stop, orchestrator_pb2.StopRequest(), TIMEOUT, "Stop"))
    console.print(f"{run}: stops after the step in hand and saves its policy", highlight=False, soft_wrap=True)


def _ask(run: Path, ask: Ask) -> None:
    """Raises ConfigError when no run is going on there."""
    peer = Peer(Role.ORCHESTRATOR, RunFiles(run).orchestrator_address())
    try:
        ask(peer, orchestrator_pb2_grpc.OrchestratorServiceStub(peer.channel))
    except ServiceUnavailable:
        raise ConfigError(f"run {run}: its orchestrator does not answer; the run has ended") from None
    finally:
        peer.close()
