"""What a gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.rpc.security.credentials import LOCAL, Credentials


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Which runs it shows, where it listens, whom it lets in. The tokens are left out of its text."""

    runs: Path
    """Folder that holds the runs."""
    run: str | None
    """The run that it was started with; None where it shows whatever lies in the folder."""
    listen: str
    """HOST:PORT, as bound."""
    operator_token: str
    viewer_token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names by which it may be addressed, besides localhost and the host of ``listen``."""
    start_runs: bool = False
    requests_per_second: float = 100.0
    buffer_url: str | None = None
    """Address of that run's Redis, with its password; None where nobody told."""
    credentials: Credentials = LOCAL
    """What the processes of runs are shown."""
    certificate: Path | None = None
    key: Path | None = None
    """PEM files: with them it speaks HTTPS."""

    def __repr__(self) -> str:
        return f"GatewaySettings(runs={str(self.runs)!r}, run={self.run!r}, listen={self.listen!r})"
