"""A server with the form of the policy's endpoint: it answers chats with the words of the last message, in upper case."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PolicyEndpoint:
    """The server. ``requests`` has the key and the body of each request; ``hold`` keeps answers back while it is set."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.released.set()
        self.closed: list[str] = []
        """Keys of requests whose connection was closed before the answer."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers["Authorization"].removeprefix("Bearer ")
                with endpoint.lock:
                    endpoint.requests.append((key, {**body, "path": self.path}))
                if not endpoint.released.is_set():
                    self.connection.settimeout(60)
                    if not self.connection.recv(1):
                        endpoint.closed.append(key)
                        return
                text = body["messages"][-1]["content"].upper()
                choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
                answer = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 512
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            # With the handshake on the thread of the connection.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def keys(self) -> list[str]:
        """Return the keys of all requests."""
        with self.lock:
            return [key for key, _ in self.requests]

    def close(self) -> None:
        """Stop the server."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
