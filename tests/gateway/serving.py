"""A gateway in a thread of the test process, and a client of its event stream."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.gateway.app import create_app
from quartet.gateway.server import server_config
from quartet.gateway.settings import GatewaySettings
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.servicer import OrchestratorServicer
from tests.training.runs import ActiveRun
from tests.waiting import LIMIT

TOKEN = "the operator's token".replace(" ", "-")
TIMEOUT = LIMIT
"""Seconds to wait for an event or a response before a test fails."""


@dataclass(frozen=True)
class Event:
    kind: str
    data: Any
    identity: str | None


class Stream:
    """An open event stream."""

    def __init__(
        self, address: str, run: str, last: str | None = None, query: str = "", receive_buffer: int | None = None
    ) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
        if receive_buffer is not None:
            self._connection.connect()
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"Last-Event-ID": last} if last else {})
        self._connection.request("GET", f"/api/v1/runs/{run}/events{query}", headers=headers)
        self.response = self._connection.getresponse()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        while line := self.response.readline():
            text = line.decode().rstrip("\n")
            if text and not text.startswith(":"):
                name, _, value = text.partition(": ")
                fields[name] = value
            elif not text and fields:
                yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                fields = {}

    def until(self, kind: str, condition: Callable[[Any], bool] = lambda _: True, **data: Any) -> list[Event]:
        """Return all events up to the first of this kind with this data that meets the condition."""
        events = []
        for event in self:
            events.append(event)
            if event.kind == kind and data.items() <= event.data.items() and condition(event.data):
                return events
        raise AssertionError(f"the stream ended before {kind} {data}: {events}")


@dataclass
class Gateway:
    """A running gateway; ``client`` sends the operator's token."""

    address: str
    client: httpx2.Client
    app: Any
    streams: list[Stream] = field(default_factory=list)

    def stream(self, run: str, last: str | None = None, query: str = "") -> Stream:
        self.streams.append(Stream(self.address, run, last, query))
        return self.streams[-1]


@contextmanager
def serving(folder: Path, **changes: Any) -> Iterator[Gateway]:
    """Run a gateway over the runs of a folder. Its streams are closed at the end."""
    config = uvicorn.Config(lambda scope: None, port=0, log_config=None, timeout_graceful_shutdown=1)
    listener = config.bind_socket()
    listener.listen()
    host, port = listener.getsockname()[:2]
    settings = GatewaySettings(
        runs=folder,
        run=None,
        listen=f"{host}:{port}",
        operator_token=TOKEN,
        **{"requests_per_second": 1000.0, **changes},
    )
    app = create_app(settings)
    scheme, verify = "http", True  # type: str, ssl.SSLContext | bool
    if settings.certificate is not None:
        scheme, verify = "https", ssl.create_default_context(cafile=settings.certificate.with_name("ca.crt"))
    server = uvicorn.Server(server_config(app, settings))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.Client(
        base_url=f"{scheme}://{host}:{port}/api/v1", headers=headers, timeout=TIMEOUT, verify=verify
    ) as client:
        gateway = Gateway(f"{host}:{port}", client, app)
        try:
            # Wait for the app. The socket accepts connections earlier.
            client.get("/session").raise_for_status()
            yield gateway
        finally:
            server.should_exit = True
            loops[0].call_soon_threadsafe(app.state.stopping.set)
            thread.join(TIMEOUT)
            listener.close()
            for stream in gateway.streams:
                stream.__exit__()
            assert not thread.is_alive()


def config_of(folder: Path, name: str, **changes: Any) -> Config:
    """Return a config; no process is started for it."""
    tree = {"data": {"prompts": "prompts.jsonl"}, "actor": {"model": "actor"}, "reward": {"model": "reward"}, **changes}
    return parse_config({**tree, "run": {"name": name, "steps": 4, "directory": str(folder)}}, "test")


def create_run(folder: Path, name: str = "some", steps: int = 0) -> RunFiles:
    """Create the files of a run of 4 steps that has committed ``steps`` of them."""
    config = config_of(folder, name)
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    commit(files, *range(1, steps + 1))
    return files


def commit(files: RunFiles, *steps: int, **metrics: float) -> None:
    for step in steps:
        files.append_metrics({"step": step, "reward_mean": 0.5 * step, "kl_mean": 1.0, "seconds": 1.0, **metrics})


@contextmanager
def serve_orchestrator(running: ActiveRun, addresses: dict[Role, str] | None = None) -> Iterator[Server]:
    """Serve the orchestrator of an active run, and write the run's ``services.json``."""
    servicer = OrchestratorServicer(
        running.board, running.control, running.live_settings, generators=running.generators
    )
    server = Server([servicer], "127.0.0.1:0")
    files = RunFiles(running.config.run_directory)
    every = {**(addresses or {}), Role.ORCHESTRATOR: server.address}
    files.write_services({role: (address,) for role, address in every.items()})
    try:
        yield server
    finally:
        files.services.unlink(missing_ok=True)
        server.stop(0.0)
