"""Runs of an agent at an HTTP service: one POST for each. See ``quartet.environments.agent_child``."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from quartet.config.section import pause_after
from quartet.environments.agent_results import Result, Unusable, failed, result_of
from quartet.errors import ConfigError
from quartet.system.secret_files import read_token

KEY = "environment.agent"
CONNECT_SECONDS = 15.0
"""Time limit for a connection."""
MAX_RESPONSE_BYTES = 1024 * 1024
"""Maximum size of a response."""
NOT_STARTED = (429, 503)
"""Statuses of a service without room for another run. The request is sent again."""
FIRST_PAUSE = 0.5
"""Pause before the second attempt of a request, in seconds. It doubles with each further one."""


class HttpAgents:
    """Runs of the agent at one URL. To be created and used on one event loop."""

    def __init__(self, url: str, api_key_file: str | None, authority_file: str | None, max_concurrent: int) -> None:
        """Raises ConfigError if a file cannot be used."""
        self._url = url
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key_file is not None:
            headers["Authorization"] = f"Bearer {read_token(Path(api_key_file), f'{KEY}.api_key_file')}"
        try:
            context = ssl.create_default_context(cafile=authority_file)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{KEY}.certificate_authority_file {authority_file}: cannot be used ({reason}); expected a PEM file"
            ) from None
        self._client = httpx2.AsyncClient(
            headers=headers,
            # A redirect could carry the keys to another host, and a proxy could read them.
            follow_redirects=False,
            trust_env=False,
            verify=context,
            limits=httpx2.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent),
            # The caller limits the time of a run.
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        )

    async def run(self, run: Mapping[str, Any]) -> Result:
        """Let the service run the agent and return its result. A cancellation closes the connection."""
        body = json.dumps({**run, "fields": json.loads(run["fields"] or "{}")}).encode()
        attempts = 0
        while True:
            attempts += 1
            problem = await self._post(body)
            if isinstance(problem, dict):
                return problem
            # The agent has not started: the time of the run limits the attempts.
            if attempts == 1:
                print(f"{problem}; the request is sent again", flush=True)
            await asyncio.sleep(pause_after(attempts, FIRST_PAUSE))

    async def _post(self, body: bytes) -> Result | str:
        """Return a result, or why the service did not start the agent."""
        where, content = f"{KEY}.url {self._url}", bytearray()
        try:
            async with self._client.stream("POST", self._url, content=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        return failed(f"{where}: a response of more than {MAX_RESPONSE_BYTES} bytes")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            why = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in why:
                return failed(f"{where}: its certificate is refused; set {KEY}.certificate_authority_file")
            return f"{where}: does not respond ({why})"
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return failed(f"{where}: the connection ended before the response ({type(error).__name__})")
        if response.status_code in NOT_STARTED:
            return f"{where}: has no room (status {response.status_code})"
        if not response.is_success:
            advice = f"; check {KEY}.api_key_file" if response.status_code in (401, 403) else ""
            return failed(f"{where}: failed (status {response.status_code}){advice}")
        try:
            return result_of(json.loads(content) if content.strip() else None)
        except (ValueError, RecursionError):
            return failed(f"{where}: the response is not JSON")
        except Unusable as error:
            return failed(f"{where}: the response {error}")
