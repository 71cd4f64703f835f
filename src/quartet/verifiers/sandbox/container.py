"""Sandbox in a container of Docker or Podman, whichever command is given."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox.process import END_SECONDS, START_SCRIPT, Limits, SandboxProcess

CLIENT_VARIABLES = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "XDG_RUNTIME_DIR")
"""Environment variables that the client gets. The program gets none of them."""

_ENGINE_ERROR = 125
"""Exit status of the client if the engine failed."""


class Container:
    """Runs programs in containers of an image that has python3. See ``Sandbox``."""

    def __init__(self, engine: str, image: str) -> None:
        """Use an ``engine`` (docker or podman) and an ``image`` that is on the machine. Raises SandboxFailed without the
        engine."""
        program = shutil.which(engine)
        if program is None:
            raise SandboxFailed(f"{engine}: not in PATH; install it")
        self._program, self._image = program, image
        self.name = f"{engine} with image {image}"

    def launch(self, limits: Limits) -> SandboxProcess:
        """Start a container with the start script. Raises SandboxFailed."""
        container = f"quartet-sandbox-{secrets.token_hex(8)}"
        memory = f"{limits.memory_mb}m"
        command = [self._program, "run", "--interactive", "--rm", "--name", container, "--pull", "never"]
        command += [
            "--network",
            "none",
            "--read-only",
            "--ipc",
            "none",
            "--log-driver",
            "none",
            "--hostname",
            "sandbox",
        ]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
        command += ["--ulimit", "nofile=64:64", "--ulimit", "nproc=4096:4096", "--ulimit", "core=0:0"]
        command += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes)]
        command += ["--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.files_mb}m", "--workdir", "/tmp"]  # noqa: S108
        command += ["--env", "HOME=/tmp", "--env", "LANG=C.UTF-8", "--entrypoint", "python3", self._image]
        return SandboxProcess(
            self.name,
            [*command, "-I", "-S", "-B", "-c", START_SCRIPT],
            kill=lambda process: self._end(process, container),
            max_output_bytes=limits.output_bytes,
            environment=_client_environment(),
            check_status=self._check_engine,
        )

    def _check_engine(self, status: int) -> None:
        """Raise SandboxFailed if the client ended because it lost the engine. A program may end with the same status."""
        if status == _ENGINE_ERROR and self._run("version") != 0:
            raise SandboxFailed(f"{self.name}: the engine does not respond any more")

    def _end(self, process: subprocess.Popen[bytes], container: str) -> None:
        """Kill the container. The engine then removes it and the client ends.

        Raises SandboxFailed if the engine does not respond.
        """
        if self._run("kill", container) != 0:
            # The engine does not know the container, or not any more.
            process.kill()
            self._run("rm", "--force", container)

    def _run(self, *command: str) -> int:
        try:
            return subprocess.run(
                [self._program, *command], capture_output=True, timeout=END_SECONDS, env=_client_environment()
            ).returncode
        except subprocess.TimeoutExpired:
            raise SandboxFailed(
                f"{self.name}: {command[0]} of a container took longer than {END_SECONDS:g} s"
            ) from None


def _client_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in CLIENT_VARIABLES if name in os.environ}
