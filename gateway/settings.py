"""The settings that a gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.rpc.security.credentials import Credentials


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway: runs, listen address and access. Its ``repr`` contains no secrets."""

    runs: Path
    """Folder that contains the runs."""
    run: str | None
    """The run that the gateway was started with; None if it serves a folder of runs."""
    listen: str
    """HOST:PORT of the bound socket."""
    operator_token: str
    viewer_token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Valid names in the Host header, besides localhost and the host of ``listen``."""
    start_runs: bool = False
    requests_per_second: float = 100.0
    buffer_url: str | None = None
    """URL of that run's Redis, with its password; None if unknown."""
    credentials: Credentials | None = None
    """Credentials for calls to the processes of runs; None for those that the config of each run names."""
    certificate: Path | None = None
    key: Path | None = None
    """PEM files. With them the gateway serves HTTPS."""

    def __repr__(self) -> str:
        return f"GatewaySettings(runs={str(self.runs)!r}, run={self.run!r}, listen={self.listen!r})"
