"""An endpoint in the place of the policy's, for the checks of agents: it notes who calls, and may keep its answers back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quartet.contract.agent import new_session_key
from quartet.system.machine import own_address

TEXT = "ok"
"""Text of every answer."""
MAX_BODY_BYTES = 8 * 1024 * 1024
HOLD_SECONDS = 60.0
"""Maximum time that an answer is kept back."""


class AgentEndpoint:
    """The server. ``base_url`` is what agents get. Use ``open_endpoint``."""

    def __init__(self, host: str) -> None:
        """Listen at a free port of ``host``."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = HOLD_SECONDS

            def do_GET(self) -> None:
                self._answer({"object": "list", "data": [{"id": endpoint.model, "object": "model"}]})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(min(length, MAX_BODY_BYTES))
                key = self.headers.get("Authorization", "").removeprefix("Bearer ")
                endpoint._note(key)
                if endpoint.is_held(key):
                    # Ends with the connection, which is what the checks wait for.
                    try:
                        ended = not self.connection.recv(1)
                    except OSError:
                        ended = True
                    if ended:
                        endpoint._note_closed(key)
                    self.close_connection = True
                    return
                self._answer(_completion(self.path), b'"stream":true' in body.replace(b" ", b""))

            def _answer(self, value: dict[str, Any], streams: bool = False) -> None:
                data = json.dumps(value).encode()
                if streams:
                    data = b"data: " + data.replace(b'"message"', b'"delta"') + b"\n\ndata: [DONE]\n\n"
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Write no log."""

        self.model = "policy"
        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        shown = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{shown}:{self._server.server_address[1]}/v1"
        self._lock = threading.Lock()
        self._requests: dict[str, int] = {}
        self._closed: set[str] = set()
        self._held: set[str] = set()
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def key(self, held: bool = False) -> str:
        """Return a new key. ``held``: requests with it get no answer."""
        key = new_session_key()
        if held:
            self._held.add(key)
        return key

    def is_held(self, key: str) -> bool:
        """Return whether requests with this key get no answer."""
        return key in self._held

    def requests(self, key: str) -> int:
        """Return the number of requests with a key."""
        with self._lock:
            return self._requests.get(key, 0)

    def keys(self) -> set[str]:
        """Return the keys of all requests."""
        with self._lock:
            return set(self._requests)

    def is_closed(self, key: str) -> bool:
        """Return whether an agent has ended a connection whose request got no answer."""
        with self._lock:
            return key in self._closed

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def _note(self, key: str) -> None:
        with self._lock:
            self._requests[key] = self._requests.get(key, 0) + 1

    def _note_closed(self, key: str) -> None:
        with self._lock:
            self._closed.add(key)


@contextmanager
def open_endpoint(service: str) -> Iterator[AgentEndpoint]:
    """Yield an endpoint that a service at HOST:PORT can call."""
    endpoint = AgentEndpoint(own_address(service))
    try:
        yield endpoint
    finally:
        endpoint.close()


def _completion(path: str) -> dict[str, Any]:
    chat = path.endswith("/chat/completions")
    content = {"message": {"role": "assistant", "content": TEXT}} if chat else {"text": TEXT}
    return {
        "id": "conformance",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, **content}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
