"""A scorer over HTTP in every dialect, written from the published interfaces, with faults."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.rewards.scorers.faults import HANG_SECONDS, MARK, score_of

Texts = Callable[[dict[str, Any]], list[str]]


def _input_texts(body: dict[str, Any]) -> list[str]:
    return [body["input"]] if isinstance(body["input"], str) else list(body["input"])


def _judge_text(body: dict[str, Any]) -> list[str]:
    return [body["messages"][-1]["content"].split("Response:\n")[1]]


def _nemo_text(body: dict[str, Any]) -> list[str]:
    return [body["response"]["output"][-1]["content"][0]["text"]]


def _entries(name: str) -> Callable[[list[Any], dict[str, Any]], Any]:
    # The answer may be in any order, as the index of each entry says.
    return lambda scores, _: {
        "data": [{"index": index, name: [0.25, score]} for index, score in reversed(list(enumerate(scores)))]
    }


def _judgement(scores: list[Any], _: dict[str, Any]) -> Any:
    content = json.dumps([{"reason": "because", "score": score} for score in scores])[1:-1]
    message = {"role": "assistant", "content": content}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20},
    }


@dataclass(frozen=True)
class ServedDialect:
    """Reading of the requests and writing of the answers of one dialect. ``whole_query``: the texts include the prompts.
    ``counts_booleans``: true is the score 1."""

    path: str
    texts: Texts
    answer: Callable[[list[Any], dict[str, Any]], Any]
    keys: frozenset[str]
    whole_query: bool = False
    counts_booleans: bool = False


def _rewards(scores: list[Any], _: dict[str, Any]) -> Any:
    return {"rewards": scores, "scores": [0.5] * len(scores), "extra_logs": {"length": scores}}


DIALECTS = {
    "openrlhf": ServedDialect(
        "/get_reward", lambda body: body["query"], _rewards, frozenset({"query", "prompts", "labels"}), True, True
    ),
    "slime": ServedDialect(
        "/rm",
        lambda body: [body["response"]],
        lambda scores, _: scores[0] if len(scores) == 1 else scores,
        frozenset({"prompt", "response", "label"}),
        counts_booleans=True,
    ),
    "vllm-classify": ServedDialect(
        "/classify", _input_texts, _entries("probs"), frozenset({"model", "input", "use_activation"}), True
    ),
    "sglang-embeddings": ServedDialect(
        "/v1/embeddings", _input_texts, _entries("embedding"), frozenset({"model", "input"}), True
    ),
    "nemo-gym": ServedDialect(
        "/verify",
        _nemo_text,
        lambda scores, body: {**body, "reward": scores[0] if len(scores) == 1 else scores},
        frozenset({"responses_create_params", "response"}),
        counts_booleans=True,
    ),
    "judge": ServedDialect(
        "/v1/chat/completions",
        _judge_text,
        _judgement,
        frozenset({"model", "messages", "temperature", "max_tokens", "seed", "response_format"}),
    ),
}


PAGES = {
    "page": b"<!doctype html><title>maintenance</title>",
    "nothing": b"",
    "error object": b'{"error": {"message": "overloaded"}}',
}
"""Answers with status 200 that are not those of a scorer."""


def _score_without_prompt(text: str) -> float:
    """Score a response. A query has the prompt's words, too, which are those from w30 on."""
    return score_of(" ".join(word for word in text.split() if not 30 <= int(word[1:]) < 40))


def _has_mark(text: str) -> bool:
    return MARK in text.split()


@dataclass
class ScorerServer:
    """A scorer on a free port of loopback.

    ``fault`` concerns requests with the mark; with ``everywhere``, all. ``faulty_requests`` limits it to the first ones, after
    ``good_requests``.
    """

    dialect: ServedDialect
    fault: str = ""
    everywhere: bool = False
    faulty_requests: int = 10**9
    good_requests: int = 0
    key: str = ""
    delay: float = 0.0
    score: Callable[[str], float] = _score_without_prompt
    is_marked: Callable[[str], bool] = _has_mark
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""
    redirect_to: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, tls: tuple[Path, Path] | None = None) -> Iterator[ScorerServer]:
        """Serve until the end. ``tls``: certificate and key."""
        scorer = self

        class Handler(_Handler):
            server_state = scorer

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: clients that give up are part of the tests."""

        server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def takes_fault(self, texts: list[str]) -> str:
        """Return the fault of a request with these texts, or ""."""
        with self.lock:
            if not self.fault or not (self.everywhere or any(map(self.is_marked, texts))):
                return ""
            if self.good_requests:
                self.good_requests -= 1
                return ""
            self.faulty_requests -= 1
            return self.fault if self.faulty_requests >= 0 else ""


class _Handler(BaseHTTPRequestHandler):
    server_state: ScorerServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        state, dialect = self.server_state, self.server_state.dialect
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            state.requests.append((self.path, body))
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            self._answer(state, dialect, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with state.lock:
                state.in_flight -= 1

    def _answer(self, state: ScorerServer, dialect: ServedDialect, body: dict[str, Any]) -> None:
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            self._send(401, b"{}")
            return
        if self.path == "/seed_session":
            self._send(200, b"{}", {"Set-Cookie": f"session={len(state.requests)}; Path=/"})
            return
        if self.path != dialect.path:
            self._send(404, b'{"detail": "not found"}')
            return
        texts = dialect.texts(body)
        state.closing.wait(state.delay)
        scores: list[Any] = [state.score(text) for text in texts]
        self._with_fault(state, dialect, body, texts, scores, state.takes_fault(texts))

    def _with_fault(
        self,
        state: ScorerServer,
        dialect: ServedDialect,
        body: dict[str, Any],
        texts: list[str],
        scores: list[Any],
        fault: str,
    ) -> None:
        statuses = {"error": 500, "overloaded": 503, "refusal": 422}
        if fault in statuses:
            # A server may quote the response in its error.
            self._send(statuses[fault], json.dumps({"detail": f"secret {texts[0]}"}).encode())
            return
        if fault.startswith("status "):
            status = int(fault.removeprefix("status "))
            self._send(status, b"<html>secret</html>", {"Location": f"{state.redirect_to}/rm"} if status < 400 else {})
            return
        if fault in PAGES:
            self._send(200, PAGES[fault])
            return
        if fault == "hang":
            state.closing.wait(HANG_SECONDS)
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        marked = [index for index, text in enumerate(texts) if state.is_marked(text)]
        # True is 1 for a scorer that is a program, so this fault is another there.
        boolean = [] if dialect.counts_booleans else True
        wrong = {"nan": "@NaN@", "infinity": "@1e999@", "boolean": boolean, "string": "1.5", "null": None}
        if fault in wrong:
            for index in marked or range(len(scores)):
                scores[index] = wrong[fault]
        if fault == "too few":
            scores = scores[1:]
        if fault == "too many":
            scores = [*scores, 0.5]
        if fault == "oversized":
            answer: Any = {"rewards": scores, "padding": "x" * 200_000}
        else:
            answer = dialect.answer(scores, body)
        # JSON has neither NaN nor infinity, so they are written by hand, also inside a judge's answer.
        text = json.dumps(answer)
        for mark in ("@NaN@", "@1e999@"):
            text = text.replace(f'\\"{mark}\\"', mark.strip("@")).replace(f'"{mark}"', mark.strip("@"))
        content = text.encode()
        if fault == "broken":
            content = content[:-1] + b","
        if fault == "empty":
            content = b""
        if fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + 10))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self._send(200, content)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
