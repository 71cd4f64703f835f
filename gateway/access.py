"""Who may do what: one middleware before everything, so that no route can be forgotten."""

from __future__ import annotations

import hmac
import ipaddress
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.gateway.http_errors import ProblemError, problem_response
from quartet.gateway.schemas import Access
from quartet.gateway.settings import GatewaySettings

log = structlog.get_logger()

MAX_BYTES = 1024 * 1024
"""Of a request's body."""
WINDOW = 10
"""Seconds over which requests are counted."""
FAILURES = 30
"""Wrong tokens of one client within a minute that are told so; those above are told to wait. A right one always gets in: others
may share its address, and no token is short enough to be guessed."""
CALLER = "quartet.caller"
"""Where a request's scope has who sent it, once that is known."""
READING = ("GET", "HEAD")
"""HEAD is answered as GET is, without the body."""
PUBLIC = ("/", "/healthz")
PUBLIC_BELOW = "/static/"

SECURITY_HEADERS = {
    "content-security-policy": (
        # Plotly sets styles on its elements, and makes pictures of charts out of blobs.
        "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. ``who`` is for the audit: the token's access and the client's address."""

    access: Access
    address: str

    @property
    def who(self) -> str:
        """Such as ``operator 127.0.0.1``."""
        return f"{self.access} {self.address}"


class AccessControl:
    """Middleware: lets in whom the settings let in, and puts its headers on every answer."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._tokens = {Access.OPERATOR: settings.operator_token.encode()}
        if settings.viewer_token is not None:
            self._tokens[Access.VIEWER] = settings.viewer_token.encode()
        self._hosts = _host_names(settings)
        self._limits = MovingWindowRateLimiter(MemoryStorage())
        self._per_client = RateLimitItemPerSecond(max(1, math.ceil(settings.requests_per_second * WINDOW)), WINDOW)
        self._per_guesser = RateLimitItemPerSecond(FAILURES, 60)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        api = not _is_public(scope["path"])

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if api:
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._check(scope)
        except ProblemError as error:
            refusal = problem_response(error.status, error.detail, error.fields, error.headers)
            await refusal(scope, receive, guarded)
            return
        if api and scope["method"] == "HEAD":
            # The routes know GET alone. No body is asked for: a stream ends with its headers.
            await self._app({**scope, "method": "GET"}, _limited(receive), _without_body(guarded))
            return
        await self._app(scope, _limited(receive), guarded)

    async def _check(self, scope: Scope) -> None:
        """Raises ProblemError unless the request may go on; leaves the caller in the scope."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        self._check_host(host)
        address = scope["client"][0] if scope.get("client") else "unknown"
        if _is_public(scope["path"]) and scope["method"] in READING:
            await self._check_rate(self._per_client, "public", address)
            return
        _check_origin(headers.get("origin"), host)
        access = await self._access(headers, address)
        await self._check_rate(self._per_client, access, address)
        if access is Access.VIEWER and scope["method"] not in READING:
            # In the gateway's log alone: who may not command does not write in a run's audit either.
            log.warning("refused a viewer's command", address=address, method=scope["method"], path=scope["path"][:200])
            raise ProblemError(403, "this token may only read; commands take the operator's token")
        _check_length(headers)
        scope[CALLER] = Caller(access, address)

    def _check_host(self, host: str) -> None:
        """Another site's name that leads here is DNS rebinding: its scripts would be of the same origin."""
        if not host:
            raise ProblemError(400, "Host: missing; expected the gateway's address")
        if host not in self._hosts and _without_port(host) not in self._hosts:
            raise ProblemError(
                421,
                f"Host {host!r}: not a name of this gateway; use the address that it printed, or add the name to "
                "gateway.allowed_hosts (--allow-host)",
            )

    async def _access(self, headers: Headers, address: str) -> Access:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if not token:
            await self._check_rate(self._per_client, "public", address)
            raise _unauthorized(
                "Authorization: missing; expected 'Bearer TOKEN' with the token of the link that was printed"
            )
        given, found = token.strip().encode(), None
        for access, expected in self._tokens.items():
            # Every token is compared in full, so that the time says nothing of which one was near.
            if hmac.compare_digest(given, expected):
                found = access
        if found is None or kind.lower() != "bearer":
            await self._check_rate(self._per_guesser, "guesser", address)
            raise _unauthorized(
                "Authorization: not this gateway's token; it prints one each time it starts unless it is given one"
            )
        return found

    async def _check_rate(self, limit: RateLimitItemPerSecond, kind: str, address: str) -> None:
        if not await self._limits.hit(limit, kind, address):
            window = await self._limits.get_window_stats(limit, kind, address)
            seconds = max(1, math.ceil(window.reset_time - time.time()))
            raise ProblemError(
                429, f"too many requests; come back in {seconds} s", headers={"retry-after": str(seconds)}
            )


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"www-authenticate": "Bearer"})


def _is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(PUBLIC_BELOW)


def _host_names(settings: GatewaySettings) -> frozenset[str]:
    host = settings.listen.rpartition(":")[0].lower()
    names = {host, "localhost", "127.0.0.1", "[::1]", *(name.lower() for name in settings.allowed_hosts)}
    try:
        if ipaddress.ip_address(host.strip("[]")).is_unspecified:
            # It listens everywhere: what it is called there, only allowed_hosts can say.
            names.discard(host)
    except ValueError:
        pass
    return frozenset(names)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _check_origin(origin: str | None, host: str) -> None:
    """Browsers name the page that a request comes from; programs need not. A page of elsewhere is refused whatever it asks."""
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise ProblemError(403, f"Origin {origin!r}: requests of other sites' pages are refused")


def _check_length(headers: Mapping[str, str]) -> None:
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BYTES:
        raise ProblemError(413, _too_large())


def _too_large() -> str:
    return f"body: larger than {MAX_BYTES} bytes; expected less"


def _without_body(send: Send) -> Send:
    """Passes on the head of an answer, and ends it there."""
    ended = False

    async def heading(message: Message) -> None:
        nonlocal ended
        if not ended:
            await send(message)
        if message["type"] == "http.response.start":
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return heading


def _limited(receive: Receive) -> Receive:
    """Counts the body's bytes: a client need not have said how many there are."""
    seen = 0

    async def counting() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BYTES:
            raise HTTPException(413, _too_large())
        return message

    return counting


_bearer = HTTPBearer(auto_error=False, description="The token that the gateway printed, or was given.")


async def viewer(request: Request, _: Annotated[object, Security(_bearer)]) -> Caller:
    """Who sent the request; whoever comes so far may read."""
    found: Caller | None = request.scope.get(CALLER)
    if found is None:
        # Only if a path were public by mistake.
        raise _unauthorized("Authorization: missing")
    return found


async def operator(caller: Annotated[Caller, Depends(viewer)]) -> Caller:
    """Who sent the command. Raises ProblemError unless it may command."""
    if caller.access is not Access.OPERATOR:
        raise ProblemError(403, "this token may only read; commands take the operator's token")
    return caller


Viewer = Annotated[Caller, Depends(viewer)]
Operator = Annotated[Caller, Depends(operator)]
