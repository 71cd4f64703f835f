"""Access control as one middleware in front of the whole app, so that it covers every route."""

from __future__ import annotations

import hmac
import ipaddress
import math
import time

import structlog
from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.gateway.access.body_limits import check_content_length, limit_body, omit_body
from quartet.gateway.access.callers import CALLER_KEY, Caller, operator_required, unauthorized
from quartet.gateway.http.http_errors import ProblemError, problem_response
from quartet.gateway.schemas import Access
from quartet.gateway.settings import GatewaySettings

log = structlog.get_logger()

RATE_WINDOW_SECONDS = 10
"""Time over which the requests of a client are counted."""
MAX_WRONG_TOKENS = 30
"""Wrong tokens per client and minute that get a 401; further ones get a 429. A valid token is always accepted: clients may
share an address, and tokens are too long to guess."""
READ_METHODS = ("GET", "HEAD")
"""Methods of read requests. HEAD is handled like GET, without the response body."""
PUBLIC_PATHS = ("/", "/healthz")
PUBLIC_PREFIX = "/static/"

SECURITY_HEADERS = {
    "content-security-policy": (
        # Plotly sets inline styles and renders chart images from blobs.
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


class AccessControl:
    """Middleware that checks host, origin, token and rate of each request, and adds security headers to each response."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._tokens = {Access.OPERATOR: settings.operator_token.encode()}
        if settings.viewer_token is not None:
            self._tokens[Access.VIEWER] = settings.viewer_token.encode()
        self._hosts = _host_names(settings)
        self._limits = MovingWindowRateLimiter(MemoryStorage())
        max_requests = max(1, math.ceil(settings.requests_per_second * RATE_WINDOW_SECONDS))
        self._client_limit = RateLimitItemPerSecond(max_requests, RATE_WINDOW_SECONDS)
        self._wrong_token_limit = RateLimitItemPerSecond(MAX_WRONG_TOKENS, 60)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        is_api = not _is_public(scope["path"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if is_api:
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._check(scope)
        except ProblemError as error:
            response = problem_response(error.status, error.detail, error.fields, error.headers)
            await response(scope, receive, send_with_headers)
            return
        if is_api and scope["method"] == "HEAD":
            # The routes accept GET only. An event stream must end after its headers.
            await self._app({**scope, "method": "GET"}, limit_body(receive), omit_body(send_with_headers))
            return
        await self._app(scope, limit_body(receive), send_with_headers)

    async def _check(self, scope: Scope) -> None:
        """Store the caller in the scope. Raises ProblemError if the request is refused."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        self._check_host(host)
        address = scope["client"][0] if scope.get("client") else "unknown"
        if _is_public(scope["path"]) and scope["method"] in READ_METHODS:
            await self._check_rate(self._client_limit, "public", address)
            return
        _check_origin(headers.get("origin"), host)
        access = await self._authenticate(headers, address)
        await self._check_rate(self._client_limit, access, address)
        if access is Access.VIEWER and scope["method"] not in READ_METHODS:
            # Logged by the gateway only: a viewer must not be able to write to a run's audit log.
            log.warning("refused a viewer's command", address=address, method=scope["method"], path=scope["path"][:200])
            raise operator_required()
        check_content_length(headers)
        scope[CALLER_KEY] = Caller(access, address)

    def _check_host(self, host: str) -> None:
        """Refuse unknown host names: DNS rebinding would give another site's scripts this origin."""
        if not host:
            raise ProblemError(400, "Host: missing; send the gateway's address")
        if host not in self._hosts and _without_port(host) not in self._hosts:
            raise ProblemError(
                421,
                f"Host {host!r}: not a name of this gateway; use the address that it printed, or add the name to "
                "gateway.allowed_hosts (--allow-host)",
            )

    async def _authenticate(self, headers: Headers, address: str) -> Access:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not token:
            await self._check_rate(self._client_limit, "public", address)
            raise unauthorized("Authorization: missing; send 'Bearer TOKEN' with the token from the printed link")
        given, access = token.strip().encode(), None
        for candidate, expected in self._tokens.items():
            # Compare with every token in constant time, so that timing reveals nothing.
            if hmac.compare_digest(given, expected):
                access = candidate
        if access is None or scheme.lower() != "bearer":
            await self._check_rate(self._wrong_token_limit, "wrong token", address)
            raise unauthorized(
                "Authorization: wrong token; the gateway prints a new token at each start unless one is configured"
            )
        return access

    async def _check_rate(self, limit: RateLimitItemPerSecond, kind: str, address: str) -> None:
        if not await self._limits.hit(limit, kind, address):
            window = await self._limits.get_window_stats(limit, kind, address)
            seconds = max(1, math.ceil(window.reset_time - time.time()))
            raise ProblemError(429, f"too many requests; retry in {seconds} s", headers={"retry-after": str(seconds)})


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


def _host_names(settings: GatewaySettings) -> frozenset[str]:
    host = settings.listen.rpartition(":")[0].lower()
    names = {host, "localhost", "127.0.0.1", "[::1]", *(name.lower() for name in settings.allowed_hosts)}
    try:
        if ipaddress.ip_address(host.strip("[]")).is_unspecified:
            # Listening on all interfaces: only allowed_hosts can tell the external names.
            names.discard(host)
    except ValueError:
        pass
    return frozenset(names)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _check_origin(origin: str | None, host: str) -> None:
    """Refuse requests from pages of other sites. Browsers always send the origin; other programs may omit it."""
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise ProblemError(403, f"Origin {origin!r}: requests from pages of other sites are refused")
