"""Servers in the terms of OpenEnv's published interface, with faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server as SocketServer
from websockets.sync.server import ServerConnection, serve

from tests.waiting import LIMIT

Observed = dict[str, Any]


class Counter:
    """An episode: each action's message is repeated with the seed, and the third ends it with reward 1."""

    def __init__(self, seed: int) -> None:
        self.seed, self.steps = seed, 0

    def observed(self, echoed: str) -> Observed:
        done = self.steps == 3
        observation = {"echoed_message": f"{echoed}/{self.seed}/{self.steps}"}
        return {"observation": observation, "reward": 1.0 if done else None, "done": done}

    def step(self, action: dict[str, Any]) -> Observed:
        self.steps += 1
        return self.observed(action["message"])


class HTTPServer:
    """OpenEnv over HTTP. ``fault`` replaces the answer to a path: it writes to the handler."""

    def __init__(self) -> None:
        self.fault: dict[str, Callable[[Handler], None]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.episodes: dict[str, Counter] = {}
        self.released = threading.Event()
        server = self

        class Bound(Handler):
            owner = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    owner: HTTPServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.requests.append((self.path, body))
        if self.path in self.owner.fault:
            self.owner.fault[self.path](self)
            return
        if self.path == "/reset":
            episode = self.owner.episodes[body["episode_id"]] = Counter(body["seed"])
            self.answer(episode.observed("start"))
        else:
            self.answer(self.owner.episodes[body["episode_id"]].step(body["action"]))

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({"status": "healthy"})
        else:
            self.answer({"episode_id": "e", "step_count": sum(each.steps for each in self.owner.episodes.values())})

    def answer(self, value: Any, status: int = 200) -> None:
        self.raw(json.dumps(value).encode(), status)

    def raw(self, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def cut(self) -> None:
        self.raw(b'{"observation": {', length=100)
        self.close_connection = True

    def drop(self) -> None:
        self.close_connection = True

    def hang(self) -> None:
        self.owner.released.wait(LIMIT)
        self.close_connection = True

    def drip(self) -> None:
        """Send a byte now and then, so that no single read times out."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        while not self.owner.released.wait(0.05):
            try:
                self.wfile.write(b" ")
            except OSError:
                break
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class WebSocketServer:
    """OpenEnv over WebSocket at /ws. ``fault`` replaces the answer to a type of message; it gets the connection."""

    def __init__(self) -> None:
        self.fault: dict[str, Callable[[ServerConnection], None]] = {}
        self.messages: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.released = threading.Event()
        self.closed = 0
        self._server: SocketServer = serve(self._handle, "127.0.0.1", 0)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()

    def _handle(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.paths.add(connection.request.path)
        episode = Counter(0)
        try:
            for text in connection:
                message = json.loads(text)
                self.messages.append(message)
                kind = message["type"]
                if kind in self.fault:
                    self.fault[kind](connection)
                elif kind == "close":
                    self.closed += 1
                    return
                elif kind == "reset":
                    episode = Counter(message["data"].get("seed", 0))
                    send(connection, "observation", episode.observed("start"))
                else:
                    send(connection, "observation", episode.step(message["data"]))
        except ConnectionClosed:
            return


def send(connection: ServerConnection, kind: str, data: Any) -> None:
    """Send one message."""
    connection.send(json.dumps({"type": kind, "data": data}))
