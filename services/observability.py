"""How a process lets itself be looked at: figures for Prometheus, spans of its part in every step. None of it can fail a run."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.rpc.call_observers import CallMetrics, CallTraces, Observer
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.server import HostedRole, check_listen_address
from quartet.telemetry.prometheus import MetricsServer, ServiceMetrics, process_registry
from quartet.telemetry.traces import Traces
from quartet.types import Role

log = structlog.get_logger()

ANYWHERE = "127.0.0.1:0"
"""Where figures are served that the config gives no address for."""


class Observation:
    """One process's figures and spans."""

    def __init__(self, roles: Sequence[Role], config: Config, credentials: Credentials = LOCAL) -> None:
        """Raises ConfigError for an address beyond loopback without certificates or leave. Nothing listens yet."""
        self._key, given = f"services.{roles[0]}.metrics_listen", getattr(config.services, roles[0]).metrics_listen
        self._listen, self._wanted = given or ANYWHERE, given is not None
        self._certificates = credentials.folder
        try:
            if not credentials.encrypted:
                check_listen_address(self._listen, config.security.allow_plaintext)
        except ConfigError as error:
            raise ConfigError(f"{self._key}: {error}") from None
        name = "+".join(roles)
        self.registry = process_registry(name)
        self.traces = _traces(config, name)
        self.observers: list[Observer] = [CallMetrics(self.registry)]
        if self.traces is not None:
            self.observers.append(CallTraces(self.traces))
        self._server: MetricsServer | None = None

    def of_services(self, hosted: Sequence[HostedRole]) -> None:
        """Adds what the model services tell of themselves."""
        self.registry.register(ServiceMetrics(lambda: [role.status() for role in hosted]))

    def begin(self) -> None:
        """Serves the figures. Raises ConfigError where the config's address is taken; without one the process goes on."""
        try:
            self._server = MetricsServer(self.registry, self._listen, self._certificates)
        except ConfigError as error:
            if self._wanted:
                raise ConfigError(f"{self._key}{str(error).removeprefix('metrics')}") from None
            log.warning("figures are not served", error=str(error))

    @property
    def address(self) -> str:
        """HOST:PORT of the figures; empty where they are not served."""
        return self._server.address if self._server is not None else ""

    def close(self) -> None:
        """Sends the last spans. The figures are served as long as the process lives."""
        if self.traces is not None:
            self.traces.close()


def _traces(config: Config, role: str) -> Traces | None:
    if config.telemetry.otlp_endpoint is None:
        return None
    try:
        return Traces(config.telemetry.otlp_endpoint, role, config.run.name)
    except Exception as error:  # OpenTelemetry's own settings come from the environment, and may be anything.
        log.warning("no traces", error=str(error))
        return None
