"""Prometheus metrics: those of every process, those of model services, and the HTTP server that exposes them."""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Info, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from quartet import __version__
from quartet.config.section import is_loopback
from quartet.contract.status import DeviceReading, Role, ServiceStatus
from quartet.errors import ConfigError
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def process_registry(role: str) -> CollectorRegistry:
    """Return a registry with the metrics of every process: role and version, memory, CPU time, open files, Python."""
    registry = CollectorRegistry()
    Info("quartet_build", "Role and version of this process.", registry=registry).info(
        {"role": role, "version": __version__}
    )
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(GpuMemory())
    return registry


class GpuMemory(Collector):
    """Memory of torch tensors on each CUDA device."""

    def collect(self) -> Iterator[Metric]:
        """Return nothing if torch is not imported: reading metrics must not import it."""
        torch = sys.modules.get("torch")
        memory = GaugeMetricFamily(
            "quartet_gpu_memory_bytes", "Memory of tensors on a CUDA device.", labels=("device",)
        )
        # Any other question, such as whether a GPU is available, would start the CUDA driver in a process that uses none.
        if torch is not None and torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                memory.add_metric((f"cuda:{device}",), torch.cuda.memory_allocated(device))
        yield memory


class DeviceMetrics(Collector):
    """Readings of the devices of this process."""

    def __init__(self, readings: Callable[[], Sequence[DeviceReading]]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge per kind of reading, without the devices that do not report it."""
        readings = self._readings()
        for name, text, field in (
            ("busy_ratio", "Share of the last second in which the GPU was busy, or of the cores used, 0 to 1.", "busy"),
            ("memory_used_bytes", "Memory in use: of the GPU, or of this process.", "memory_used_bytes"),
            ("memory_total_bytes", "Memory of the GPU, or that this process may use.", "memory_total_bytes"),
            ("power_watts", "Power of the GPU.", "power_watts"),
        ):
            gauge = GaugeMetricFamily(f"quartet_device_{name}", text, labels=("device",))
            for reading in readings:
                if (value := getattr(reading, field)) is not None:
                    gauge.add_metric((reading.name,), value)
            yield gauge


class ServiceMetrics(Collector):
    """Metrics from the statuses of the roles in this process."""

    def __init__(self, statuses: Callable[[], Sequence[ServiceStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """Read the status of every role."""
        statuses = self._statuses()
        busy = CounterMetricFamily(
            "quartet_busy_seconds", "Seconds spent computing, by kind of work.", labels=("kind",)
        )
        # Roles in one process share the compute thread, and each reports the thread's total.
        kinds: dict[str, float] = {}
        for status in statuses:
            for kind, seconds in status.busy_seconds.items():
                kinds[kind] = max(seconds, kinds.get(kind, 0.0))
        for kind, seconds in kinds.items():
            busy.add_metric((kind,), seconds)
        pending = max((status.work_pending for status in statuses), default=0)
        yield busy
        yield GaugeMetricFamily(
            "quartet_work_pending", "Calls that wait for the compute thread, including the active one.", pending
        )
        tokens = CounterMetricFamily(
            "quartet_tokens", "Response tokens, generated or trained on.", labels=("role", "kind")
        )
        for status in statuses:
            for kind, number in status.tokens.items():
                tokens.add_metric((status.role, kind), number)
        yield tokens
        turns = CounterMetricFamily(
            "quartet_turns",
            "Turns of episodes, generated, or recorded by an earlier attempt of the episode.",
            labels=("role", "source"),
        )
        for status in statuses:
            for source, number in status.turns.items():
                turns.add_metric((status.role, source), number)
        yield turns
        yield _by_role(
            "quartet_policy_version", "Updates applied to the model.", statuses, lambda status: status.policy_version
        )
        yield _by_role(
            "quartet_model_parameters", "Parameters of the model.", statuses, lambda status: status.parameters
        )
        yield _by_role(
            "quartet_model_broken",
            "1 if an update broke off and the model must be restored, else 0.",
            statuses,
            lambda status: status.broken,
        )
        yield _by_role(
            "quartet_buffer_unreachable",
            "1 if the role's last attempt to reach the rollout buffer failed, else 0.",
            statuses,
            lambda status: status.buffer_unreachable,
        )
        yield _by_role(
            "quartet_open_sessions",
            "Open sessions of the environment.",
            statuses,
            lambda status: status.open_sessions if status.role is Role.ENVIRONMENT else None,
        )
        yield _by_role(
            "quartet_weight_transfer_bytes",
            "Compressed bytes of the last transfer of weights into a generator; 0 by shared memory and CUDA IPC.",
            statuses,
            lambda status: status.last_transfer.bytes if status.last_transfer else None,
        )
        yield _by_role(
            "quartet_weight_transfer_seconds",
            "Seconds of the last transfer of weights into a generator: to receive and verify them.",
            statuses,
            lambda status: status.last_transfer.transfer_seconds if status.last_transfer else None,
        )
        yield _by_role(
            "quartet_weight_load_seconds",
            "Seconds to load the last weights into a generator's engine and to read them back.",
            statuses,
            lambda status: status.last_transfer.load_seconds if status.last_transfer else None,
        )
        yield _by_role(
            "quartet_weight_publication_bytes",
            "Bytes of all weights of the policy version that the actor has published last.",
            statuses,
            lambda status: status.last_publication.total_bytes if status.last_publication else None,
        )
        yield _by_role(
            "quartet_weight_publication_seconds",
            "Seconds in which the actor published its last policy version for generators.",
            statuses,
            lambda status: status.last_publication.seconds if status.last_publication else None,
        )


def _by_role(
    name: str, text: str, statuses: Sequence[ServiceStatus], value: Callable[[ServiceStatus], float | None]
) -> GaugeMetricFamily:
    """Return a gauge with the value of each role, except those for which it is None."""
    family = GaugeMetricFamily(name, text, labels=("role",))
    for status in statuses:
        if (number := value(status)) is not None:
            family.add_metric((status.role,), float(number))
    return family


REQUEST_TIMEOUT = 10.0
"""Seconds within which a connection must send its request, including the TLS handshake."""


class MetricsServer:
    """HTTP server that serves the metrics of a registry at /metrics, from a separate thread."""

    def __init__(self, registry: CollectorRegistry, listen: str, certificates: Path | None = None) -> None:
        """Listen at HOST:PORT. Raises ConfigError if the port is in use or the address is not this machine's.

        ``certificates`` is the process's folder of certificates. With it, readers beyond loopback need a certificate of the same
        authority.
        """
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"metrics {listen}: cannot listen there ({error.strerror or error}); choose another port, or null for a free one"
            ) from None
        self._server.RequestHandlerClass.timeout = REQUEST_TIMEOUT  # type: ignore[attr-defined]
        if certificates is not None and not is_loopback(host):
            # Each connection does its handshake in its own thread, so that a silent one does not block the others.
            self._server.socket = _context(certificates).wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        if is_loopback(host):
            self._server.set_app(_reject_foreign_hosts(make_wsgi_app(registry), host))
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _context(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / AUTHORITY))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / CERTIFICATE, certificates / KEY)
    return context


def _reject_foreign_hosts(app: WSGIApplication, host: str) -> WSGIApplication:
    """Refuse requests whose Host header is not loopback, so that DNS rebinding cannot read the metrics."""

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        wanted = re.sub(r":\d*$", "", environ.get("HTTP_HOST", host)).lower()
        if wanted != host.lower() and not is_loopback(wanted):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"metrics of this machine: request them at 127.0.0.1 or localhost\n"]
        return app(environ, start_response)

    return respond
