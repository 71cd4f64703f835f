"""The environment of a run, for the processes that generate."""

from __future__ import annotations

from quartet.config.root import Config
from quartet.rpc.environment_client import EnvironmentClient
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator.episodes import EnvironmentAccess

OPEN_PER_DECODED = 2
"""Episodes that are open for each one that the engine decodes, so that its batch stays full while others wait."""


def environment_access(config: Config, credentials: Credentials) -> EnvironmentAccess | None:
    """Return the access to the environment service at services.environment.address; None for a run without turns."""
    address = config.services.environment.address
    if not config.has_environment or address is None:
        return None
    client = EnvironmentClient(
        address, config.environment.timeout_seconds, config.timeouts, config.recovery, credentials
    )
    decoded = config.rollout.max_concurrent_sequences
    max_open = min(OPEN_PER_DECODED * decoded, config.environment.max_sessions)
    return EnvironmentAccess(client, max_open, config.recovery.max_attempts)
