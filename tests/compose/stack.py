"""A running stack of docker-compose.yml, with methods for requests, commands and clean-up."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from shlex import join
from typing import Any, TypeVar

Value = TypeVar("Value")

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0
"""Timeout of every wait in seconds, long enough for a machine that is busy with other work."""
SECRETS: dict[str, set[str]] = {
    "setup": set(),
    "redis": {"redis"},
    "actor": {"redis", "rpc"},
    "critic": {"redis", "rpc"},
    "reward": {"rpc"},
    "reference": {"rpc"},
    "generator": {"redis", "rpc", "traffic"},
    "environment": {"rpc"},
    "orchestrator": {"redis", "rpc"},
    "gateway": {"redis", "rpc", "gateway", "viewer"},
    "prometheus": {"viewer"},
    "grafana": {"grafana"},
}
"""The folders of secrets that each service needs."""


def compose_command() -> list[str]:
    """Return the command of the installed Compose. Raises RuntimeError if Docker or Compose is missing."""
    if shutil.which("docker") is None or _fails("docker", "info"):
        raise RuntimeError(
            "no Docker engine responds: install and start one, and give this user access to it (docker info)"
        )
    if not _fails("docker", "compose", "version"):
        return ["docker", "compose"]
    if shutil.which("docker-compose") is not None:
        return ["docker-compose"]
    raise RuntimeError("Docker Compose is missing: install the compose plugin of Docker, or docker-compose")


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``docker ARGUMENTS``."""
    return subprocess.run([shutil.which("docker") or "docker", *arguments], capture_output=True, text=True, check=check)


def wait_for(query: Callable[[], Value], event: str, timeout: float = TIMEOUT) -> Value:
    """Return the first result of ``query`` that is not empty."""
    deadline = time.monotonic() + timeout
    while not (result := query()):
        assert time.monotonic() < deadline, f"{event}: not within {timeout:.0f} s"
        time.sleep(0.25)
    return result


class Stack:
    """One Compose project with a unique name, isolated from other stacks on this machine."""

    def __init__(self, name: str, files: list[str], settings: Path, port: int) -> None:
        """``settings``: path of the ``.env`` file. ``port``: the published port of the gateway."""
        self.name = name
        self._compose = [*compose_command(), "--project-directory", str(ROOT), "--project-name", name]
        self._compose += [
            "--env-file",
            str(settings),
            *(part for file in files for part in ("--file", str(ROOT / file))),
        ]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COMPOSE_", "QUARTET_"))}
        # Compose 1 then builds with `docker build` and its cache.
        self._environment = {**inherited, "COMPOSE_DOCKER_CLI_BUILD": "1"}
        self._port, self._tls = port, any("tls" in file for file in files)

    def compose(self, *arguments: str) -> str:
        """Return the output of ``docker compose ARGUMENTS``."""
        result = subprocess.run([*self._compose, *arguments], env=self._environment, capture_output=True, text=True)
        assert result.returncode == 0, (
            f"compose {' '.join(arguments)}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        )
        return result.stdout

    def shell(self, line: str, folder: Path) -> str:
        """Run a line of a page in a folder of this machine, with ``docker compose`` for this project. Return its output."""
        command = line.replace("docker compose", join(self._compose))
        result = subprocess.run(
            ["/bin/sh", "-c", command], cwd=folder, env=self._environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{line}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def run_in(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container of a service."""
        return docker("exec", self.container(service), *command, check=False)

    def container(self, service: str) -> str:
        """Return the id of a service's only container, running or exited."""
        (result,) = self.containers(service)
        return result

    def containers(self, service: str) -> list[str]:
        """Return the ids of all containers of a service, running or exited."""
        return self._labelled(["ps", "--all"], f"com.docker.compose.service={service}")

    def token(self) -> str:
        """Return the operators' token."""
        return self.run_in("gateway", "cat", "/run/secrets/gateway/gateway_token").stdout.strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """Return the output of ``docker inspect`` for a service's container."""
        result: dict[str, Any] = json.loads(docker("inspect", self.container(service)).stdout)[0]
        return result

    def logs(self, service: str) -> str:
        """Return the complete log of a service."""
        result = docker("logs", self.container(service))
        return result.stdout + result.stderr

    def resources(self) -> list[str]:
        """Return the containers, volumes and networks of this project."""
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [f"{kind[0]} {name}" for kind in kinds for name in self._labelled(kind)]

    def _labelled(self, kind: list[str], *labels: str) -> list[str]:
        all_labels = (f"com.docker.compose.project={self.name}", *labels)
        filters = [part for label in all_labels for part in ("--filter", f"label={label}")]
        return docker(*kind, *filters, "--quiet").stdout.split()

    def get(self, path: str, token: str | None) -> tuple[int, Any]:
        """Send a GET request to the gateway. Return the status, and the parsed JSON or the text of the response."""
        headers = {"Host": f"localhost:{self._port}"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        connection = self._connection()
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, json.loads(text) if "json" in response.headers.get("content-type", "") else text

    def _connection(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        authority = self.run_in("gateway", "cat", "/run/certificates/gateway/ca.crt").stdout
        trust = ssl.create_default_context(cadata=authority)
        return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=20, context=trust)
