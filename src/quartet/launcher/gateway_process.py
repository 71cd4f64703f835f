"""The gateway as a process: started with a run or over a folder of runs, asked over HTTP whether it lives."""

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
from quartet.config import Config
from quartet.errors import ServiceFailed
from quartet.launcher.service_process import ServiceProcess
from quartet.launcher.supervisor import exit_error

NAME = "gateway"
TOKEN = "QUARTET_GATEWAY_TOKEN"
"""Variable of the operator's token."""
TOKENS = (TOKEN, "QUARTET_GATEWAY_VIEWER_TOKEN")
"""What only the gateway is to know of the environment."""
NICENESS = 5
"""Of a run's gateway: where cores are few, the run has them first."""
POLL = 0.02
"""Seconds between looks at a process that is getting ready."""
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - what to dial, not where to listen


class GatewayProcess(ServiceProcess):
    """Never needed by a run: it goes on where the gateway cannot."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str],
        niceness: int = 0,
        own_token: bool = False,
        encrypted: bool = False,
    ) -> None:
        """It keeps its token over restarts: one is made where the user set none, in the environment or as its ``own_token``.

        ``encrypted``: whether it speaks HTTPS.
        """
        self._niceness, self._scheme = niceness, "https" if encrypted else "http"
        self._made = None if own_token or TOKEN in os.environ else secrets.token_urlsafe(32)
        tokens = {} if self._made is None else {TOKEN: self._made}
        # It multiplies no matrices; pools of threads would only take the services' cores.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        super().__init__(NAME, [f"quartet.{NAME}", *arguments], {**os.environ, **alone, **tokens, **environment}, log)

    @classmethod
    def of_run(cls, config: Config, path: Path, url: str, log: Path) -> GatewayProcess:
        """The one that goes with a run, whose resolved config is at ``path``. ``url`` is the buffer's."""
        settings = config.gateway
        return cls(
            ["--config", str(path)],
            log,
            {BUFFER_URL_VARIABLE: url},
            NICENESS,
            own_token=settings.token_file is not None,
            encrypted=settings.certificate_file is not None,
        )

    def begin(self) -> None:
        """Starts the process."""
        super().begin()
        with suppress(OSError):  # It has ended already, or the system does not let us: it runs as it is.
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self._niceness)

    def wait_until_ready(self, patience: float) -> None:
        """At most ``patience`` seconds. Raises ConfigError for what the user can mend, ServiceFailed for all else."""
        deadline = time.monotonic() + patience
        while not self.ready:
            if self.process.poll() is not None:
                self.read_messages()
                raise exit_error(self)
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{self.name}: not ready within {patience:g} s")
            time.sleep(POLL)
            self.read_messages()

    def link(self, run: str | None = None) -> str:
        """Where a browser opens the dashboard, at a ``run``. A token that was made here is in it; the user knows their own."""
        host, _, port = (self.address or "").rpartition(":")
        parts = [f"/runs/{quote(run)}/overview"] if run is not None else []
        parts += [f"token={quote(self._made)}"] if self._made is not None else []
        return f"{self._scheme}://{_ANYWHERE.get(host, host)}:{port}/{'#' if parts else ''}{'&'.join(parts)}"

    def answers(self, timeout: float) -> bool:
        """Whether it answers an HTTP request within ``timeout`` seconds, with whatever."""
        if self.address is None:
            return False
        host, _, port = self.address.rpartition(":")
        place = (_ANYWHERE.get(host, host).strip("[]"), int(port))
        if self._scheme == "https":
            # Its own child at its own address: whether the name in the certificate is this one does not matter.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *place, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(*place, timeout=timeout)
        try:
            connection.request("GET", "/healthz", headers={"Connection": "close"})
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True
