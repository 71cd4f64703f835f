"""Training runs in one process with metrics and traces enabled, and a collector of traces."""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from quartet.config.layout import model_roles
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import HostedRole, Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.generator.factory import build_generator
from quartet.services.observability import Observability
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.telemetry.run_metrics import RunMetrics, buffer_depth
from quartet.services.orchestrator.training_run import TrainingRun, run_training
from quartet.services.roles import build_model_role
from tests.training.runs import Run

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Collector:
    """HTTP server that receives spans like an OpenTelemetry collector and responds with ``status``."""

    status: int = 200
    spans: list[tuple[str, Any]] = field(default_factory=list)
    """(service.name, span) of all received spans."""
    requests: int = 0
    url: str = ""

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                if self.path == "/v1/traces" and collector.status == 200:
                    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                        names = {item.key: item.value.string_value for item in resource.resource.attributes}
                        collector.spans += [
                            (names["service.name"], span) for scope in resource.scope_spans for span in scope.spans
                        ]
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass
class Observed:
    """A finished run with the metrics and the observability of each process."""

    run: Run
    samples: dict[str, Samples]
    observations: dict[str, Observability]


def read(address: str) -> Samples:
    """Scrape HOST:PORT; return all samples by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return the value of one sample."""
    return samples[name, frozenset(labels.items())]


def run_observed(config: Config) -> Observed:
    """Train from start to end, and read the metrics before the services stop. ``rollout.generators`` are started, too."""
    with ExitStack() as stack:
        RunFiles(config.run_directory).write_config(config.to_yaml())
        observations: dict[str, Observability] = {}

        def observe(name: str, role: Role) -> Observability:
            observations[name] = Observability([role], config)
            return observations[name]

        def serve(name: str, role: Role, servicer: HostedRole) -> str:
            observation = observe(name, role)
            observation.add_services([servicer])
            observation.start()
            server = Server(
                [servicer], "127.0.0.1:0", interceptors=observation.interceptors, metrics_address=observation.address
            )
            stack.callback(server.stop, 5.0)
            return server.address

        overrides = []
        for role in model_roles(config):
            address = serve(role, role, build_model_role(role, config, ComputeThread(), threads=1))
            overrides.append(f"services.{role}.address={address}")
        generators = [
            serve(f"generator {number}", Role.GENERATOR, build_generator(config, ComputeThread(), 1, LOCAL))
            for number in range(config.rollout.generators)
        ]
        overrides.append(f"services.generators={generators}")
        addressed = load_config(RunFiles(config.run_directory).config, overrides)
        board, exit_codes = ProgressBoard(config.run.name, config.run.steps), list[int]()
        assert config.buffer.url is not None
        observation = observe(Role.ORCHESTRATOR, Role.ORCHESTRATOR)
        training = TrainingRun(
            addressed,
            config.buffer.url,
            board,
            RunControl(RunFiles(config.run_directory), persist=False),
            traces=observation.traces,
        )
        observation.registry.register(RunMetrics(addressed, board, buffer_depth(config.buffer.url, config.run.name)))
        observation.start()
        files = RunFiles(config.run_directory)
        run_training(training, files, board, lambda outcome: exit_codes.append(outcome.exit_status))
        samples = {name: read(observation.address) for name, observation in observations.items()}
    closing = [threading.Thread(target=observation.close) for observation in observations.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    return Observed(Run(RunFiles(config.run_directory), board.current(), exit_codes[0]), samples, observations)
