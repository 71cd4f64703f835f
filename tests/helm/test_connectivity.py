"""The script of ``helm test`` with addresses of local listeners, and mutual TLS with the certificates of the chart."""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quartet.config.deployment import SecurityConfig
from quartet.rpc.health import HealthListener
from quartet.rpc.security.credentials import AccessControl, Credentials
from tests.helm.rendering import example, manifests, of_kind
from tests.waiting import LIMIT

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of the chart as pods mount them."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    for name, item in of_kind(manifests(example("cpu-kind")), "Secret").items():
        process = name.removeprefix("quartet-certificate-")
        if process != name:
            (folder / process).mkdir()
            for file, content in item["data"].items():
                (folder / process / file).write_bytes(base64.b64decode(content))
    return folder


class _HealthHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Disable the log."""


@contextmanager
def gateway(certificates: Path) -> Iterator[int]:
    """Serve /healthz over TLS with the certificate of the gateway; yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HealthHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "gateway/tls.crt", certificates / "gateway/tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("serving", [True, False])
def test_helm_test_checks_every_process(certificates: Path, serving: bool) -> None:
    pod = of_kind(manifests(example("cpu-kind")), "Pod")["quartet-test"]
    (container,) = pod["spec"]["containers"]
    servicer = health.HealthServicer()
    servicer.set("", SERVING if serving else NOT_SERVING)
    listener = HealthListener(servicer, "127.0.0.1:0")
    with gateway(certificates) as port:
        (script,) = container["args"]
        for name in ("actor", "critic", "reference", "orchestrator"):
            assert f"quartet-{name}:9101" in script
            script = script.replace(f"quartet-{name}:9101", listener.address)
        script = script.replace("quartet-gateway:8080", f"localhost:{port}").replace("/certificates", str(certificates))
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        result = subprocess.run(
            [*container["command"], script], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    listener.stop()
    assert (result.returncode == 0) == serving, result.stderr
    assert result.stdout.count(" is healthy") == (4 if serving else 0)
    assert ("/healthz 200" in result.stdout) == serving


@pytest.mark.parametrize(
    ("caller", "expected"),
    [("orchestrator", None), ("gateway", None), ("operator", None), ("critic", grpc.StatusCode.PERMISSION_DENIED)],
)
def test_the_certificates_of_the_chart_authenticate_callers(
    certificates: Path, caller: str, expected: grpc.StatusCode | None
) -> None:
    security = SecurityConfig(certificates=certificates)
    actor = Credentials("actor", security)
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[AccessControl(actor)])
    servicer = health.HealthServicer()
    servicer.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = actor.listen(server, "127.0.0.1:0")
    server.start()
    try:
        with Credentials(caller, security).channel("actor", f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            if expected is None:
                assert check(health_pb2.HealthCheckRequest(), timeout=5).status == SERVING
            else:
                with pytest.raises(grpc.RpcError) as error:
                    check(health_pb2.HealthCheckRequest(), timeout=5)
                assert error.value.code() is expected
    finally:
        server.stop(None).wait()
