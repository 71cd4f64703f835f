"""The HTTP server of sessions: /v1/chat/completions, /v1/completions and /v1/models, on a thread of its own.

A key is checked before anything else of a request is read. Bodies share a budget of memory, and requests wait for it. A client
that stops in the middle of a request, or does not read its answer, is disconnected.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.errors import ConfigError
from quartet.services.generator.sessions.bodies import MAX_BODIES_BYTES, Body, ByteBudget
from quartet.services.generator.sessions.connections import SessionProtocol
from quartet.services.generator.sessions.protocol import (
    CHAT_PATH,
    COMPLETION_PATH,
    Call,
    ProtocolError,
    parse_chat,
    parse_completion,
)
from quartet.services.generator.sessions.responses import Choice, Header, body_of, events_of, model_of, models_of
from quartet.services.generator.sessions.session import Answer, Session, ended

if TYPE_CHECKING:
    from quartet.services.generator.sessions.traffic import TrafficSessions, User

log = structlog.get_logger()

MAX_WAITING = 64
"""Requests of one session at once. A further one gets a 429."""
MAX_CONNECTIONS, RESERVED_FILES = 4096, 256
"""Open connections, and the open files that a process needs besides. Beyond them, see ``connections``."""
MAX_NEW_CONNECTIONS = RESERVED_FILES // 2
"""Connections that are accepted at once, before the limit is applied to them. With them, reserved files are left."""
HELD_EVENTS = 3
"""Events at the end of a stream that are held back: the last reason to finish, the usage and the end."""
KEEP_ALIVE_SECONDS = 30
"""Time for which an idle connection stays open after a response."""
MAX_INCOMPLETE_HEADER_BYTES = 32 * 1024
"""Size of headers that have not been received completely."""
THREADS = 4
"""Threads for texts, token ids and Redis."""
MAX_ENDED_KEYS = 10_000
"""Number of keys of ended episodes that are told from wrong ones."""
STOP_SECONDS = 5.0
"""Longest wait for the end of the server."""


class SessionServer:
    """Server for the sessions of one process. Thread-safe where not said otherwise.

    ``loop`` is its event loop, and ``threads`` are for work that takes long.
    """

    def __init__(self, listen: str, certificate: tuple[Path, Path] | None = None) -> None:
        """Listen at HOST:PORT; port 0 selects a free one. ``certificate``: files of a certificate and its key, for TLS.

        Clients wait until ``start``. Raises ConfigError if the address cannot be used.
        """
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._budget = ByteBudget(MAX_BODIES_BYTES, MAX_BODIES_BYTES // 4)
        self._tasks = set[asyncio.Task[None]]()
        self._waiting: dict[Hashable, int] = {}
        self.responses: Counter[str] = Counter()
        """Number of responses by class of their status, such as 2xx."""
        self._users: TrafficSessions | None = None
        self._created = int(time.time())
        self.threads = ThreadPoolExecutor(THREADS, "sessions")
        self.loop = asyncio.new_event_loop()
        self._socket = _bind(listen)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server = uvicorn.Server(_server_config(_counted(self._app(), self.responses), certificate))
        self._thread = threading.Thread(target=self._serve, name="sessions", daemon=True)

    def start(self, users: TrafficSessions | None = None) -> None:
        """Answer requests: those with the keys of ``users``, or of agents without them."""
        self._users = users
        self._thread.start()

    def register(self, key: str, session: Session) -> None:
        """Admit requests with this key. Call it on the event loop."""
        self._sessions[_digest(key)] = session

    def unregister(self, key: str) -> None:
        """Refuse requests with this key. Call it on the event loop."""
        digest = _digest(key)
        if self._sessions.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > MAX_ENDED_KEYS:
                self._ended.popitem(last=False)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end. Call it on the event loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop the server. Requests that are being answered are disconnected."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(STOP_SECONDS)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve([self._socket]))
        except Exception as error:
            log.error("the server of sessions has ended", error=str(error))

    def _app(self) -> Starlette:
        post, get = ["POST"], ["GET"]
        return Starlette(
            routes=[
                Route(CHAT_PATH, self._chat, methods=post),
                Route(COMPLETION_PATH, self._completion, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{model:path}", self._model, methods=get),
                Route("/v1/sessions/{session}", self._user_session, methods=[*get, "DELETE"]),
                Route("/v1/sessions/{session}/reward", self._reward, methods=post),
            ],
            exception_handlers={ProtocolError: _on_error, HTTPException: _on_http_error, Exception: _on_unexpected},
        )

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, parse_chat)

    async def _completion(self, request: Request) -> Response:
        return await self._complete(request, parse_completion)

    async def _models(self, request: Request) -> Response:
        return JSONResponse(models_of(self._model_name(request), self._created))

    async def _model(self, request: Request) -> Response:
        model = self._model_name(request)
        self._check_model(request.path_params["model"], model)
        return JSONResponse(model_of(model, self._created))

    async def _complete(self, request: Request, parse: Callable[[bytes], tuple[str, Call]]) -> Response:
        body = Body(request)
        try:
            sender = self._sender(request)
            async with self._admitted(sender.session), self._budget.taken(sender.owner, body.size()) as taken:
                data = await body.read()
                taken.reduce(len(data))
                model, call = await self.loop.run_in_executor(self.threads, parse, data)
                self._check_model(model, sender.model)
                return await self._answer(request, await sender.find(call), call)
        except ProtocolError:
            await body.discard()
            raise
        except ClientDisconnect:
            # No one reads it.
            return Response(status_code=499)

    async def _answer(self, request: Request, session: Session, call: Call) -> Response:
        retries = request.headers.get("x-stainless-retry-count", "0")
        answer = session.answer(call, retries not in ("", "0"), request.headers.get("idempotency-key"))
        assert answer.task is not None
        gone = self.loop.create_task(_disconnected(request))
        try:
            await asyncio.wait((answer.task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.task.done():
                raise ClientDisconnect
            answer.task.result()
            choices, header = await session.choices(answer, call), session.header(answer)
            body = b""
            if not call.stream:
                body = await self.loop.run_in_executor(self.threads, _json_body, call, header, choices)
            events = events_of(call, header, choices) if call.stream else iter(())
            return _Delivery(session, answer, header, body, events)
        except BaseException as error:
            if isinstance(error, ProtocolError) and _is_sent_again(error.status):
                session.refused += 1
            session.release(answer)
            raise
        finally:
            gone.cancel()

    async def _user_session(self, request: Request) -> Response:
        """Show or delete a session of a user."""
        users, user = self._user(request)
        work = users.delete if request.method == "DELETE" else users.info
        return JSONResponse(await work(user, request.path_params["session"]))

    async def _reward(self, request: Request) -> Response:
        """Give a session of a user its reward."""
        body = Body(request)
        try:
            users, user = self._user(request)
            async with self._budget.taken(user, body.size()):
                session = request.path_params["session"]
                return JSONResponse(await users.give_reward(user, session, await body.read()))
        except ProtocolError:
            await body.discard()
            raise
        except ClientDisconnect:
            return Response(status_code=499)

    def _user(self, request: Request) -> tuple[TrafficSessions, User]:
        """Return the sender of a request about a session. Raises ProtocolError, HTTPException without users."""
        if self._users is None:
            raise HTTPException(404)
        return self._users, self._users.user(self._key_of(request))

    def _model_name(self, request: Request) -> str:
        """Return the name of the policy for the sender of a request. Raises ProtocolError."""
        return self._sender(request).model

    def _sender(self, request: Request) -> _Sender:
        """Return the sender of a request for an answer. Raises ProtocolError for a wrong key."""
        if self._users is None:
            session = self._session(request)

            async def same(_: Call) -> Session:
                return session

            return _Sender(session.model, session, session, same)
        users, user, ids = self._users, self._users.user(self._key_of(request)), request.headers.getlist("x-session-id")
        given = next(iter(ids), None)

        async def found(call: Call) -> Session:
            return await users.session(user, ids, call)

        # A session has one turn at a time. Requests without an id have sessions of their own.
        return _Sender(users.model, user, (user, given) if given else object(), found)

    def _session(self, request: Request) -> Session:
        """Return the session of an agent by the key of a request. Raises ProtocolError."""
        key = self._key_of(request)
        # The digest of a key is looked up, so the time that it takes tells nothing about other keys.
        digest = _digest(key)
        if (session := self._sessions.get(digest)) is not None:
            return session
        if digest in self._ended:
            raise ended()
        raise ProtocolError(
            401,
            "Wrong API key. Send the key that Quartet gave to this run of the agent; it changes with every run.",
            "invalid_api_key",
        )

    def _key_of(self, request: Request) -> str:
        """Return the key of a request. Raises ProtocolError without one."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            source = (
                "an agent gets the key of its session from Quartet"
                if self._users is None
                else "ask the operator of this deployment for one"
            )
            raise ProtocolError(401, f"No API key. Send 'Authorization: Bearer KEY'; {source}.", "invalid_api_key")
        return key.strip()

    def _check_model(self, given: str, model: str) -> None:
        if given != model:
            source = "; an agent gets it in OPENAI_MODEL" if self._users is None else ""
            raise ProtocolError(
                404, f"The model {given[:100]!r} does not exist. Use {model!r}{source}.", "model_not_found", "model"
            )

    @asynccontextmanager
    async def _admitted(self, sender: Hashable) -> AsyncIterator[None]:
        count = self._waiting.get(sender, 0)
        if count >= MAX_WAITING:
            if isinstance(sender, Session):
                sender.refused += 1
            raise ProtocolError(
                429,
                f"{count} requests of this session are being answered or wait, one after the other; wait for answers.",
                "rate_limit_exceeded",
            )
        self._waiting[sender] = count + 1
        try:
            yield
        finally:
            self._waiting[sender] -= 1
            if not self._waiting[sender]:
                del self._waiting[sender]


class _Sender(NamedTuple):
    """The sender of a request. ``model``: the name of the policy for it. ``find`` returns the session of its request.

    ``owner`` is what bodies in memory are counted by, ``session`` what waiting requests are.
    """

    model: str
    owner: Hashable
    session: Hashable
    find: Callable[[Call], Awaitable[Session]]


class _Delivery(Response):
    """A complete answer on its way to a client. It counts as delivered unless the connection ends before its last part.

    Its end is held back until that is noted: an agent that has its whole answer may end at once, or close the connection.
    """

    def __init__(self, session: Session, answer: Answer, header: Header, body: bytes, events: Iterator[bytes]) -> None:
        """``body`` is empty for a stream, which has ``events``."""
        self._session, self._answer = session, answer
        parts: Iterable[bytes] = (body[:-1], body[-1:]) if body else events
        self._parts, self._held = parts, 1 if body else HELD_EVENTS
        super().__init__(body, media_type="application/json" if body else "text/event-stream")
        if header.session:
            self.headers["x-session-id"] = header.session
        if not body:
            del self.headers["content-length"]
            self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            held = deque[bytes]()
            for part in self._parts:
                held.append(part)
                if len(held) > self._held:
                    await send({"type": "http.response.body", "body": held.popleft(), "more_body": True})
            # An empty part, to wait until the client has read most of what is before it.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            if not await request.is_disconnected():
                await self._session.deliver(self._answer)
            await send({"type": "http.response.body", "body": b"".join(held), "more_body": False})
        finally:
            self._session.release(self._answer)


def _json_body(call: Call, header: Header, choices: Sequence[Choice]) -> bytes:
    return json.dumps(body_of(call, header, choices), ensure_ascii=False, separators=(",", ":")).encode(
        errors="replace"
    )


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return JSONResponse(error.body, error.status, dict(error.headers or {}))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path[:100]} does not exist. This server has POST /v1/chat/completions, "
        "POST /v1/completions and GET /v1/models, and for users /v1/sessions/ID and /v1/sessions/ID/reward."
    )
    return JSONResponse(ProtocolError(error.status_code, message).body, error.status_code, dict(error.headers or {}))


def _on_unexpected(request: Request, error: Exception) -> Response:
    log.error("internal error", method=request.method, path=request.url.path[:100], exc_info=error)
    return JSONResponse(ProtocolError(500, "Internal error; see the log of the process.").body, 500)


def _is_sent_again(status: int) -> bool:
    """Return whether OpenAI's clients send a request again by themselves after an error with this status."""
    return status in (408, 409, 429) or status >= 500


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"environment.agent.listen {listen}: cannot listen there ({error.strerror or error}); set a free port of this "
            "machine, or port 0"
        ) from None


def _counted(app: ASGIApp, responses: Counter[str]) -> ASGIApp:
    """Return an application that counts its responses by class of their status."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                responses[f"{message['status'] // 100}xx"] += 1
            await send(message)

        await app(scope, receive, observed)

    return counted


def _server_config(app: ASGIApp, certificate: tuple[Path, Path] | None) -> uvicorn.Config:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        app,
        http=partial(SessionProtocol, OrderedDict()),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max(1, min(MAX_CONNECTIONS, files - RESERVED_FILES)),
        backlog=MAX_NEW_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_INCOMPLETE_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        ssl_certfile=None if certificate is None else certificate[0],
        ssl_keyfile=None if certificate is None else certificate[1],
    )
