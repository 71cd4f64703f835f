"""Metrics and trace spans of a process. Their failures never fail a run."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from quartet.config.layout import check_listen_address
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.rpc.call_interceptors import CallInterceptor, CallMetrics, CallTraces
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.server import HostedRole
from quartet.system.devices import DeviceMonitor
from quartet.telemetry.prometheus import DeviceMetrics, MetricsServer, ServiceMetrics, process_registry
from quartet.telemetry.traces import Traces

log = structlog.get_logger()

DEFAULT_LISTEN = "127.0.0.1:0"
"""Listen address of the metrics if the config has none."""


class Observability:
    """Prometheus metrics and trace spans of one process."""

    def __init__(self, roles: Sequence[Role], config: Config, credentials: Credentials = LOCAL) -> None:
        """Check the address without listening yet.

        Raises ConfigError for an address beyond loopback without certificates or ``allow_plaintext``.
        """
        configured = getattr(config.services, roles[0]).metrics_listen
        self._key = f"services.{roles[0]}.metrics_listen"
        self._listen, self._required = configured or DEFAULT_LISTEN, configured is not None
        self._certificates = credentials.folder
        try:
            if not credentials.encrypted:
                check_listen_address(self._listen, config.security.allow_plaintext)
        except ConfigError as error:
            raise ConfigError(f"{self._key}: {error}") from None
        name = "+".join(roles)
        self.registry = process_registry(name)
        self.traces = _traces(config, name)
        self.interceptors: list[CallInterceptor] = [CallMetrics(self.registry)]
        if self.traces is not None:
            self.interceptors.append(CallTraces(self.traces))
        self._server: MetricsServer | None = None

    def add_services(self, hosted: Sequence[HostedRole]) -> None:
        """Add the metrics of the model services of this process."""
        self.registry.register(ServiceMetrics(lambda: [role.status() for role in hosted]))

    def watch_devices(self, indices: Sequence[int]) -> DeviceMonitor:
        """Return a monitor of the GPUs with torch's ``indices``, or of the CPU without any. Add its readings to the metrics."""
        devices = DeviceMonitor(indices)
        self.registry.register(DeviceMetrics(devices.readings))
        return devices

    def start(self) -> None:
        """Serve the metrics. Raises ConfigError if a configured address is taken; without one, the process continues."""
        try:
            self._server = MetricsServer(self.registry, self._listen, self._certificates)
        except ConfigError as error:
            if self._required:
                raise ConfigError(f"{self._key}{str(error).removeprefix('metrics')}") from None
            log.warning("metrics are not served", error=str(error))

    @property
    def address(self) -> str:
        """HOST:PORT of the metrics; empty if they are not served."""
        return self._server.address if self._server is not None else ""

    def close(self) -> None:
        """Send the last spans. The metrics are served until the process ends."""
        if self.traces is not None:
            self.traces.close()


def _traces(config: Config, role: str) -> Traces | None:
    if config.telemetry.otlp_endpoint is None:
        return None
    try:
        return Traces(config.telemetry.otlp_endpoint, role, config.run.name)
    except Exception as error:  # OpenTelemetry reads environment variables, so any exception is possible.
        log.warning("traces cannot be exported", error=str(error))
        return None
