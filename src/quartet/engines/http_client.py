"""HTTP client for engines that run as servers: settings, calls, streams of server-sent events, and their errors."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2

from quartet.config.rollout import EngineServerConfig
from quartet.engines.engine import Cancelled as IsCancelled
from quartet.errors import (
    AccessRefused,
    Cancelled,
    ConfigError,
    MismatchError,
    NoResponse,
    QuartetError,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.system.secret_files import read_token

POLL_SECONDS = 0.1
"""Time between checks whether the caller still waits."""
CONNECT_SECONDS = 15.0
"""Time limit for a connection."""
MAX_EVENT_BYTES = 16 * 2**20
"""Maximum size of one event of a stream, many times the size of a response."""
MAX_ANSWER_BYTES = 256 * 2**20
"""Maximum size of an answer that is not a stream, such as the checksums of a large model."""
_MAX_SHOWN = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """Address and settings of a server that generates.

    ``software`` and ``section``, the config section, appear in messages. ``model``: name of the model on the server; None selects
    the only one. ``weights_directory``: a folder that the server reads under the same path.
    ``timeout``: seconds without any output after which pending requests fail; ``load_timeout``: seconds for one step of a weight
    update. ``verify_weights``: compare checksums from the server with the weights after each update, if it offers them.
    """

    software: str
    section: str
    url: str
    weights: Literal["folder", "lora"]
    weights_directory: Path
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    load_timeout: float = 600.0
    max_in_flight: int = 256
    authority: Path | None = None
    verify_weights: bool = True

    def __str__(self) -> str:
        return f"{self.software} server at {self.url}"


def engine_server(
    config: EngineServerConfig, software: str, section: str, max_in_flight: int, **others: Any
) -> EngineServer:
    """Return the settings of a config section, with the key from its file. Raises ConfigError if a file cannot be read."""
    key = None
    if config.api_key_file is not None:
        key = read_token(config.api_key_file, f"{section}.api_key_file")
    return EngineServer(
        software=software,
        section=section,
        url=config.url,
        weights=config.weights,
        weights_directory=config.weights_directory,
        api_key=key,
        timeout=config.timeout_seconds,
        load_timeout=config.load_timeout_seconds,
        max_in_flight=max_in_flight,
        authority=config.certificate_authority_file,
        **others,
    )


Explanation = Callable[[int, str, str], QuartetError | None]
"""Function that explains an error status from status, path and text; None for the general explanation."""


class ServerClient:
    """HTTP client of one server. Every method raises a QuartetError that names the server."""

    def __init__(self, server: EngineServer, explain: Explanation) -> None:
        self.server, self._explain = server, explain
        self._options: dict[str, Any] = {
            "base_url": server.url.rstrip("/"),
            "headers": {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            "verify": _tls_context(server),
            # A proxy must not see the key of the server, or the traffic of the cluster.
            "trust_env": False,
        }
        self._client = httpx2.Client(**self._options, timeout=self._timeout(server.timeout))

    def get(self, path: str, **params: str) -> Any:
        """Return the JSON that the server has at ``path``."""
        return self._call("GET", path, self.server.timeout, params=params)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None, **params: str
    ) -> Any:
        """POST ``body`` as JSON and return the JSON answer, None if it is empty or not JSON. ``timeout`` is in seconds."""
        options = {} if body is None else {"json": body}
        return self._call("POST", path, timeout or self.server.timeout, params=params, **options)

    def streams(self, path: str) -> EventStreams:
        """Return concurrent streams of events from POST requests to ``path``."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.server.max_in_flight)
        # The time without output counts over all requests: a request may wait for its turn on the server.
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        return EventStreams(self, path, httpx2.AsyncClient(**self._options, limits=limits, timeout=timeout))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def refusal(self, status: int, path: str, text: str) -> QuartetError:
        """Convert an answer with an error status."""
        server, shown = self.server, _message(text)
        if (special := self._explain(status, path, shown)) is not None:
            return special
        where = f"{server}: {path}: {shown} (status {status})"
        if status in (401, 403):
            return AccessRefused(f"{where}; check {server.section}.api_key_file")
        if status in (400, 404, 405, 413, 422):
            return MismatchError(f"{where}; check {server.section}.url and the version of the server")
        if status == 429:
            return ServiceBusy(where)
        if status in (502, 503, 504):
            return ServiceUnavailable(where)
        return ServiceFailed(where)

    def failure(self, error: httpx2.HTTPError, path: str) -> QuartetError:
        """Convert an error of the connection."""
        server, why = self.server, str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return AccessRefused(
                f"{server}: has a certificate of an unknown authority ({why}); set {server.section}.certificate_authority_file"
            )
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return ServiceUnavailable(
                f"{server}: does not respond ({why}); start the server, or correct {server.section}.url"
            )
        if isinstance(error, httpx2.TimeoutException):
            return NoResponse(f"{server}: {path}: no response in time; raise {server.section}.timeout_seconds")
        return ServiceFailed(f"{server}: {path}: the connection ended before the response ({why})")

    def _call(self, method: str, path: str, seconds: float, **options: Any) -> Any:
        try:
            with self._client.stream(method, path, timeout=self._timeout(seconds), **options) as response:
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ServiceFailed(f"{self.server}: {path}: an answer of more than {MAX_ANSWER_BYTES} bytes")
        except httpx2.HTTPError as error:
            raise self.failure(error, path) from None
        if not response.is_success:
            raise self.refusal(response.status_code, path, content.decode(errors="replace"))
        try:
            return json.loads(content)
        except ValueError:
            if method == "POST":
                return None
            raise MismatchError(
                f"{self.server}: {path}: the answer is not JSON; correct {self.server.section}.url"
            ) from None

    def _timeout(self, seconds: float) -> httpx2.Timeout:
        return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream. ``data`` is None at the end of the stream."""

    key: str
    data: dict[str, Any] | None


class EventStreams:
    """Concurrent POST requests whose responses are streams of server-sent events.

    The network is served while the caller waits for events, on the thread of the caller.
    """

    def __init__(self, client: ServerClient, path: str, http: httpx2.AsyncClient) -> None:
        self._client, self._path, self._http = client, path, http
        self._loop = asyncio.new_event_loop()
        self._arrived: asyncio.Queue[StreamEvent | QuartetError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, key: str, body: Mapping[str, Any]) -> None:
        """Send a request. Its events have this key."""
        task = self._loop.create_task(self._read(key, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wait(self, cancelled: IsCancelled, paused: Callable[[], bool] = lambda: False) -> list[StreamEvent]:
        """Wait for at least one event and return all that arrived. The time limit does not run while the server is ``paused``.

        Raises Cancelled, or the error of the first failed request.
        """
        server, start = self._client.server, time.monotonic()
        while True:
            if cancelled():
                raise Cancelled("generation was cancelled by its caller")
            if events := self._loop.run_until_complete(self._collect()):
                return events
            if paused():
                start = time.monotonic()
            if time.monotonic() - start > server.timeout:
                raise NoResponse(
                    f"{server}: no output for {server.timeout:g} s; raise {server.section}.timeout_seconds"
                )

    def close(self) -> None:
        """Close the connections. The server ends the requests that still run."""
        if self._loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        await self._loop.shutdown_asyncgens()

    async def _collect(self) -> list[StreamEvent]:
        try:
            results = [await asyncio.wait_for(self._arrived.get(), POLL_SECONDS)]
        except TimeoutError:
            return []
        while not self._arrived.empty():
            results.append(self._arrived.get_nowait())
        events = []
        for result in results:
            if isinstance(result, QuartetError):
                raise result
            events.append(result)
        return events

    async def _read(self, key: str, body: Mapping[str, Any]) -> None:
        client, path = self._client, self._path
        try:
            async with self._http.sse(path, method="POST", json=body, max_event_size=MAX_EVENT_BYTES) as source:
                response = source.response
                if not response.is_success:
                    text = (await response.aread()).decode(errors="replace")
                    raise client.refusal(response.status_code, path, text)
                async for event in source:
                    if event.data == "[DONE]":
                        break
                    self._arrived.put_nowait(StreamEvent(key, self._parsed(event.data)))
            self._arrived.put_nowait(StreamEvent(key, None))
        except httpx2.HTTPError as error:
            self._arrived.put_nowait(client.failure(error, path))
        except QuartetError as error:
            self._arrived.put_nowait(error)

    def _parsed(self, text: str) -> dict[str, Any]:
        server = self._client.server
        try:
            data = json.loads(text)
        except ValueError:
            raise ServiceFailed(f"{server}: {self._path}: an event that is not JSON: {text[:_MAX_SHOWN]!r}") from None
        if not isinstance(data, dict):
            raise ServiceFailed(f"{server}: {self._path}: an event that is not a JSON object: {text[:_MAX_SHOWN]!r}")
        if (error := data.get("error")) is not None:
            raise ServiceFailed(f"{server}: {self._path}: {_message(json.dumps({'error': error}))}")
        return data


def _tls_context(server: EngineServer) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=server.authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{server.section}.certificate_authority_file {server.authority}: cannot be used "
            f"({error.strerror or error}); expected a PEM file"
        ) from None


def _message(text: str) -> str:
    """Return the message in an error answer, shortened."""
    try:
        content = json.loads(text)
        error = content.get("error", content.get("detail", content.get("message", content)))
        shown = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        shown = text
    return (shown if isinstance(shown, str) else json.dumps(shown))[:_MAX_SHOWN]
