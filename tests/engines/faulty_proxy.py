"""An HTTP proxy that changes some answers of the server behind it, to inject faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2

Fault = Callable[[str, bytes], "tuple[int, bytes] | None"]
"""Function that gets path and body of a request. It returns status and answer, or None to ask the server."""
_FORWARDED = ("authorization", "content-type")


@contextmanager
def proxy(target: str, fault: Fault) -> Iterator[str]:
    """Start a proxy, and return its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            changed = fault(self.path, body)
            if changed is not None:
                status, answer = changed
            else:
                headers = {name: self.headers[name] for name in _FORWARDED if name in self.headers}
                response = client.request(self.command, self.path, content=body, headers=headers)
                status, answer = response.status_code, response.content
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.send_header("content-type", "text/event-stream" if answer.startswith(b"data:") else "application/json")
            self.end_headers()
            self.wfile.write(answer)

    with httpx2.Client(base_url=target, timeout=60, trust_env=False) as client:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
