"""A stack of docker-compose.yml: brought up, asked, disturbed, taken down with all that it left."""

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
from typing import Any, TypeVar

Value = TypeVar("Value")

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Timeout of every wait, in seconds. It allows for a machine that is busy with other work."""
SECRETS: dict[str, set[str]] = {
    "setup": set(),
    "redis": {"redis"},
    "actor": {"redis", "rpc"},
    "critic": {"redis", "rpc"},
    "reward": {"rpc"},
    "reference": {"rpc"},
    "orchestrator": {"redis", "rpc"},
    "gateway": {"redis", "rpc", "gateway", "viewer"},
    "prometheus": {"viewer"},
    "grafana": {"grafana"},
}
"""The folders of secrets that each service needs and can see."""


def compose_command() -> list[str]:
    """Compose as it is installed here. Raises RuntimeError where there is no Docker."""
    if shutil.which("docker") is None or _fails("docker", "info"):
        raise RuntimeError("no Docker engine answers: install and start one, and let this user reach it (docker info)")
    if not _fails("docker", "compose", "version"):
        return ["docker", "compose"]
    if shutil.which("docker-compose") is not None:
        return ["docker-compose"]
    raise RuntimeError("Docker is here, compose is not: install its compose plugin, or docker-compose")


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Return what ``docker ARGUMENTS`` answers."""
    return subprocess.run([shutil.which("docker") or "docker", *arguments], capture_output=True, text=True, check=check)


def wait_for(wanted: Callable[[], Value], what: str, patience: float = PATIENCE) -> Value:
    """The first answer of ``wanted`` that is not empty."""
    deadline = time.monotonic() + patience
    while not (result := wanted()):
        assert time.monotonic() < deadline, f"{what}: not within {patience:.0f} s"
        time.sleep(0.25)
    return result


class Stack:
    """One Compose project with a unique name, isolated from other stacks on this machine."""

    def __init__(self, name: str, files: list[str], settings: Path, port: int) -> None:
        """``settings``: what a user has as ``.env``; ``port``: where that publishes the gateway."""
        self.name = name
        self._compose = [*compose_command(), "--project-directory", str(ROOT), "--project-name", name]
        self._compose += [
            "--env-file",
            str(settings),
            *(part for file in files for part in ("--file", str(ROOT / file))),
        ]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COMPOSE_", "QUARTET_"))}
        # Compose 1 builds as `docker build` does, from its cache.
        self._environment = {**inherited, "COMPOSE_DOCKER_CLI_BUILD": "1"}
        self._port, self._tls = port, any("tls" in file for file in files)

    def compose(self, *arguments: str) -> str:
        """Return what ``docker compose ARGUMENTS`` prints."""
        done = subprocess.run([*self._compose, *arguments], env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_in(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in a service's container."""
        return docker("exec", self.container(service), *command, check=False)

    def container(self, service: str) -> str:
        """Id of a service's container, whether it runs or has ended."""
        (result,) = self._labelled(["ps", "--all"], f"com.docker.compose.service={service}")
        return result

    def token(self) -> str:
        """The operators' token."""
        return self.run_in("gateway", "cat", "/run/secrets/gateway/gateway_token").stdout.strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what Docker knows of a service's container."""
        result: dict[str, Any] = json.loads(docker("inspect", self.container(service)).stdout)[0]
        return result

    def logs(self, service: str) -> str:
        """All that a service has said."""
        done = docker("logs", self.container(service))
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project."""
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [f"{kind[0]} {one}" for kind in kinds for one in self._labelled(kind)]

    def _labelled(self, kind: list[str], *labels: str) -> list[str]:
        every = (f"com.docker.compose.project={self.name}", *labels)
        filters = [part for label in every for part in ("--filter", f"label={label}")]
        return docker(*kind, *filters, "--quiet").stdout.split()

    def ask(self, path: str, token: str | None) -> tuple[int, Any]:
        """Status and answer of a GET at the gateway's published port; what is no JSON comes as text."""
        headers = {"Host": f"localhost:{self._port}"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        connection = self._connection()
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        return answer.status, json.loads(text) if "json" in answer.headers.get("content-type", "") else text

    def _connection(self) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        authority = self.run_in("gateway", "cat", "/run/certificates/gateway/ca.crt").stdout
        trust = ssl.create_default_context(cadata=authority)
        return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=20, context=trust)
