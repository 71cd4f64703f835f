"""A process's figures for Prometheus: what every process tells of itself, what a model service has done, and where it is read."""

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
from quartet.errors import ConfigError
from quartet.secret_files import AUTHORITY, CERTIFICATE, KEY
from quartet.topology import is_loopback
from quartet.types import ServiceStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def process_registry(role: str) -> CollectorRegistry:
    """A registry with what every process tells: its role and version, memory, processor time, open files, Python."""
    registry = CollectorRegistry()
    Info("quartet_build", "What this process is.", registry=registry).info({"role": role, "version": __version__})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(GpuMemory())
    return registry


class GpuMemory(Collector):
    """Memory that torch holds on each CUDA device, in a process that uses one."""

    def collect(self) -> Iterator[Metric]:
        """Nothing where torch is not imported: a look at the figures is no reason to import it."""
        torch = sys.modules.get("torch")
        memory = GaugeMetricFamily(
            "quartet_gpu_memory_bytes", "Memory of tensors on a CUDA device.", labels=("device",)
        )
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                memory.add_metric((f"cuda:{device}",), torch.cuda.memory_allocated(device))
        yield memory


class ServiceMetrics(Collector):
    """What the roles of a process say of themselves."""

    def __init__(self, statuses: Callable[[], Sequence[ServiceStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """Asks every role."""
        statuses = self._statuses()
        busy = CounterMetricFamily(
            "quartet_busy_seconds", "Seconds spent computing, by kind of work.", labels=("kind",)
        )
        # Roles that share a process share the thread that computes, and each of them tells of all that it does.
        kinds: dict[str, float] = {}
        for status in statuses:
            for kind, seconds in status.busy_seconds.items():
                kinds[kind] = max(seconds, kinds.get(kind, 0.0))
        for kind, seconds in kinds.items():
            busy.add_metric((kind,), seconds)
        pending = max((status.work_pending for status in statuses), default=0)
        yield busy
        yield GaugeMetricFamily(
            "quartet_work_pending", "Calls that wait for the thread that computes, the one in hand included.", pending
        )
        tokens = CounterMetricFamily(
            "quartet_tokens", "Response tokens, generated or trained on.", labels=("role", "kind")
        )
        for status in statuses:
            for kind, number in status.tokens.items():
                tokens.add_metric((status.role, kind), number)
        yield tokens
        yield _by_role("quartet_policy_version", "Updates taken.", statuses, lambda status: status.policy_version)
        yield _by_role(
            "quartet_model_parameters", "Parameters of the model.", statuses, lambda status: status.parameters
        )
        yield _by_role(
            "quartet_model_broken",
            "1 where an update broke off and the model waits to be restored.",
            statuses,
            lambda status: status.broken,
        )
        yield _by_role(
            "quartet_buffer_unreachable",
            "1 where the role could not reach the rollout buffer when it last tried.",
            statuses,
            lambda status: status.buffer_unreachable,
        )


def _by_role(
    name: str, text: str, statuses: Sequence[ServiceStatus], value: Callable[[ServiceStatus], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=("role",))
    for status in statuses:
        family.add_metric((status.role,), float(value(status)))
    return family


REQUEST_TIMEOUT = 10.0
"""Seconds in which a connection must have asked, its handshake included."""


class MetricsServer:
    """Serves a registry's figures over HTTP at /metrics, from a thread of its own."""

    def __init__(self, registry: CollectorRegistry, listen: str, certificates: Path | None = None) -> None:
        """Binds HOST:PORT and starts. Raises ConfigError where that is taken or not this machine's.

        With ``certificates``, the process's own folder of them, whoever reads beyond loopback needs one of the same authority.
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
            # Hands are shaken by each connection's own thread: one that stays silent keeps nobody else waiting.
            self._server.socket = _context(certificates).wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        if is_loopback(host):
            self._server.set_app(_only_addressed_here(make_wsgi_app(registry), host))
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _context(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / AUTHORITY))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / CERTIFICATE, certificates / KEY)
    return context


def _only_addressed_here(app: WSGIApplication, host: str) -> WSGIApplication:
    """The app for who addresses this machine: a page whose name was made to mean 127.0.0.1 reads nothing."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        wanted = re.sub(r":\d*$", "", environ.get("HTTP_HOST", host)).lower()
        if wanted != host.lower() and not is_loopback(wanted):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"figures of this machine: ask for them at 127.0.0.1 or localhost\n"]
        return app(environ, start_response)

    return answer
