"""The gateway as a child process, for one run or for a folder of runs, with liveness probes over HTTP."""

from __future__ import annotations

import http.client
import os
import secrets
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from quartet.buffer.redis_url import BUFFER_URL_VARIABLE
from quartet.config.root import Config
from quartet.errors import ServiceFailed
from quartet.launcher.service_process import ServiceProcess
from quartet.launcher.supervisor import exit_error

NAME = "gateway"
TOKEN = "QUARTET_GATEWAY_TOKEN"
"""Environment variable with the operator's token."""
TOKENS = (TOKEN, "QUARTET_GATEWAY_VIEWER_TOKEN")
"""Environment variables that only the gateway may see."""
NICENESS = 5
"""Niceness of a run's gateway: with few cores, the run has priority."""
POLL_SECONDS = 0.02
"""Seconds between checks whether the process is ready."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - an address to connect to, not to listen on


class GatewayProcess(ServiceProcess):
    """The gateway process. A run continues without it if it fails."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str],
        niceness: int = 0,
        has_token_file: bool = False,
        encrypted: bool = False,
    ) -> None:
        """Start the gateway. Its token stays the same over restarts.

        A token is generated unless the user set one, in the environment or in a file (``has_token_file``). ``encrypted`` says
        whether the gateway serves HTTPS.
        """
        self._niceness, self._scheme = niceness, "https" if encrypted else "http"
        self._generated_token = None if has_token_file or TOKEN in os.environ else secrets.token_urlsafe(32)
        tokens = {} if self._generated_token is None else {TOKEN: self._generated_token}
        # The gateway multiplies no matrices: thread pools would only take cores from the services.
        single_threaded = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        super().__init__(
            NAME, [f"quartet.{NAME}", *arguments], {**os.environ, **single_threaded, **tokens, **environment}, log
        )

    @classmethod
    def for_run(cls, config: Config, path: Path, url: str, log: Path) -> GatewayProcess:
        """Start the gateway of a run whose resolved config is at ``path``. ``url`` is the address of the buffer."""
        settings = config.gateway
        return cls(
            ["--config", str(path)],
            log,
            {BUFFER_URL_VARIABLE: url},
            NICENESS,
            has_token_file=settings.token_file is not None,
            encrypted=settings.certificate_file is not None,
        )

    def start(self) -> None:
        """Start the process at its niceness."""
        super().start()
        with suppress(
            OSError
        ):  # The process has ended already, or the system forbids it: the niceness is not essential.
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self._niceness)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the gateway is ready. Raises ServiceFailed after ``timeout`` seconds.

        If the gateway ends before, raises the error that it reported: ConfigError if the user can fix it.
        """
        deadline = time.monotonic() + timeout
        while not self.ready:
            if self.process.poll() is not None:
                self.read_messages()
                raise exit_error(self)
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{self.name}: not ready within {timeout:g} s")
            time.sleep(POLL_SECONDS)
            self.read_messages()

    def link(self, run: str | None = None) -> str:
        """Return the link that opens the dashboard, at ``run`` if given. It contains the token if that was generated here."""
        host, _, port = (self.address or "").rpartition(":")
        parts = [f"/runs/{quote(run)}/overview"] if run is not None else []
        parts += [f"token={quote(self._generated_token)}"] if self._generated_token is not None else []
        return f"{self._scheme}://{_WILDCARDS.get(host, host)}:{port}/{'#' if parts else ''}{'&'.join(parts)}"

    def responds(self, timeout: float) -> bool:
        """Return whether the gateway sends any HTTP response within ``timeout`` seconds."""
        if self.address is None:
            return False
        host, _, port = self.address.rpartition(":")
        target = (_WILDCARDS.get(host, host).strip("[]"), int(port))
        if self._scheme == "https":
            # This is a child process at a known address, so the name in its certificate does not matter.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *target, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(*target, timeout=timeout)
        try:
            connection.request("GET", "/healthz", headers={"Connection": "close"})
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True
