"""A scorer over HTTP in the dialect of OpenRLHF, with the standard library only: ``python examples/rewards/scorer.py 5000``.

It scores a text by its number of distinct words. Replace ``score`` by a call of your reward model.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(query: str, label: Any) -> float:
    """Return the score of prompt and response, which are one text with special tokens."""
    return len(set(query.split())) / 10


class Handler(BaseHTTPRequestHandler):
    """Answers POST /get_reward."""

    def do_POST(self) -> None:
        """Return one reward for each query."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [score(query, label) for query, label in zip(body["query"], body["labels"], strict=True)]
        content = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
