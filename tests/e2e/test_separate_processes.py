"""Processes started separately, as in containers: a config, an overlay, mutual TLS, a token and a Redis password."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.buffer.embedded_redis import find_server
from quartet.rpc.health import problem
from quartet.system.child_processes import tied_to_parent
from tests.e2e.commands import QUARTET, Command
from tests.e2e.conftest import Run, step_metrics, weights
from tests.ports import free_ports
from tests.waiting import LIMIT

ROLES = ("actor", "critic", "reward", "reference")
PASSWORD = "a p@ss/word:with?signs"  # pragma: allowlist secret - the test's own


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis over TCP that accepts only the user ``quartet`` with the password."""
    (port,) = free_ports(1)
    rules = tmp_path / "users.acl"
    rules.write_text(
        f"user default off\nuser quartet on #{hashlib.sha256(PASSWORD.encode()).hexdigest()} ~* &* +@all\n"
    )
    command = [str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--aclfile", str(rules), "--save", ""]
    process = subprocess.Popen(tied_to_parent(command), cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def deployment(tmp_path: Path, redis_port: int) -> Path:
    """The overlay of the deployment: addresses and credentials."""
    certificates = tmp_path / "certificates"
    issued = subprocess.run([QUARTET, "certificates", certificates], capture_output=True, text=True, check=True)
    assert "valid for 365 days" in issued.stdout
    (tmp_path / "redis-password").write_text(f"{PASSWORD}\n")
    (tmp_path / "token").write_text(secrets.token_urlsafe(32))
    (tmp_path / "gateway-token").write_text("the-token-of-the-operators")
    names = (*ROLES, "orchestrator")
    ports = free_ports(3 * len(names))
    services = {
        name: {
            "address": f"127.0.0.1:{ports.pop()}",
            "metrics_listen": f"0.0.0.0:{ports.pop()}",
            "health_listen": f"127.0.0.1:{ports.pop()}",
        }
        for name in names
    }
    for service in services.values():
        service["listen"] = service["address"].replace("127.0.0.1", "0.0.0.0")
    tls = certificates / "gateway"
    tree = {
        "services": services,
        "buffer": {
            "url": f"redis://quartet@127.0.0.1:{redis_port}/0",
            "password_file": str(tmp_path / "redis-password"),
        },
        "security": {"certificates": str(certificates), "token_file": str(tmp_path / "token")},
        "gateway": {
            "listen": "0.0.0.0:0",
            "token_file": str(tmp_path / "gateway-token"),
            "certificate_file": str(tls / "tls.crt"),
            "key_file": str(tls / "tls.key"),
        },
    }
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def start_process(config: Path, deployment: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start ``python -m MODULE...`` with both configs."""
    commands: list[Command] = []

    def start(*module: str) -> Command:
        arguments = ("--config", config, "--config", deployment)
        commands.append(Command(sys.executable, "-m", *module, *arguments, cwd=tmp_path, fresh=True))
        return commands[-1]

    yield start
    for command in commands:
        command.clean_up()


@pytest.mark.slow  # test_training.py tests the same with two services.
def test_separately_started_processes_give_the_same_result_as_quartet_train(
    start_process: Callable[..., Command], deployment: Path, tmp_path: Path, first_run: Run
) -> None:
    tree = yaml.safe_load(deployment.read_text())
    services = {role: start_process("quartet.services", role) for role in ROLES}
    gateway = start_process("quartet.gateway")
    run = tmp_path / "runs" / "tiny"
    orchestrator = start_process("quartet.services", "orchestrator")
    for role, command in services.items():
        command.wait_for(lambda command=command: "event='ready'" in command.err)
        assert not problem(tree["services"][role]["health_listen"])
    url = gateway.wait_for(lambda: re.search(r"https://127\.0\.0\.1:(\d+)", gateway.out))
    api = Api(int(url[1]), tmp_path)
    orchestrator.wait_for(lambda: api.request("POST", "/pause")[0] == 202)
    gateway.wait_for(lambda: {"serving"} == {service["health"] for service in api.request("GET", "/services")[1]})
    assert {service["role"] for service in api.request("GET", "/services")[1]} == {*ROLES, "orchestrator", "redis"}

    # A restarted orchestrator container resumes the run and stays paused.
    orchestrator.process.kill()
    orchestrator.process.wait()
    stopped = start_process("quartet.services", "orchestrator")
    stopped.wait_for(lambda: "event='ready'" in stopped.err)
    stopped.process.terminate()
    assert stopped.process.wait(LIMIT) == 143  # The run has not ended, so its supervisor must start it again.
    event = "run resumed" if (run / "metrics.jsonl").exists() else "run started"
    restarted = start_process("quartet.services", "orchestrator")
    restarted.wait_for(lambda: "event='ready'" in restarted.err)
    restarted.wait_for(lambda: api.request("POST", "/resume")[0] == 202)

    result = restarted.wait()
    assert result.code == 0, result
    assert event in result.err
    trained = Run(result, run)
    assert step_metrics(trained) == step_metrics(first_run)
    assert weights(run) == weights(first_run.directory)

    metrics = tree["services"]["actor"]["metrics_listen"]
    # A client that never completes its TLS handshake does not block others.
    with socket.create_connection(("127.0.0.1", int(metrics.rpartition(":")[2]))):
        assert "quartet_rpc_requests_total" in _read_metrics(metrics, tmp_path, "prometheus")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _read_metrics(tree["services"]["actor"]["metrics_listen"], tmp_path, None)

    config = (run / "config.yaml").read_text()
    output = "".join(command.out + command.err for command in (*services.values(), gateway, restarted))
    for secret in ("p@ss", "p%40ss", (tmp_path / "token").read_text(), "the-token-of-the-operators"):
        assert secret not in config + output
    for command in (*services.values(), gateway):
        os.kill(command.process.pid, signal.SIGTERM)
    assert {command.process.wait(LIMIT) for command in (*services.values(), gateway)} == {0}
    assert not (run / "gateway.json").exists()


def _tls_context(folder: Path, process: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "certificates" / "operator" / "ca.crt")
    context.check_hostname = False
    if process is not None:
        files = folder / "certificates" / process
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context


class Api:
    """The REST API of a run, over HTTPS."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port, self._folder = port, folder

    def request(self, method: str, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, context=_tls_context(self._folder, None), timeout=20
        )
        try:
            headers = {"Authorization": "Bearer the-token-of-the-operators"}
            connection.request(method, f"/api/v1/runs/tiny{path}", headers=headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _read_metrics(address: str, folder: Path, process: str | None) -> str:
    address = address.replace("0.0.0.0", "127.0.0.1")
    connection = http.client.HTTPSConnection(address, context=_tls_context(folder, process), timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()
