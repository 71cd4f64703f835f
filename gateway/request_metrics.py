"""The gateway's own figures, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.telemetry.prometheus import process_registry

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST
METHODS = ("GET", "POST", "PATCH")


class GatewayMetrics:
    """A registry of its own, so that several gateways of one process keep apart."""

    def __init__(self) -> None:
        self._registry = process_registry("gateway")
        self.requests = Counter(
            "quartet_gateway_requests",
            "Requests answered.",
            ["method", "path", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "quartet_gateway_request_seconds",
            "Seconds until an answer began.",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge("quartet_gateway_requests_in_flight", "Requests in hand.", registry=self._registry)
        self.streams = Gauge("quartet_gateway_event_streams", "Event streams that are open.", registry=self._registry)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)


class CountRequests:
    """Middleware: counts requests and times them until their answer begins; streams go on for long after."""

    def __init__(self, app: ASGIApp, figures: GatewayMetrics) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        figures, begun, streams = self._figures, time.perf_counter(), False

        async def counting(message: Message) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                # By the route's pattern: the paths themselves have no end, and neither have the methods that one can invent.
                path = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                figures.requests.labels(method, path, message["status"]).inc()
                figures.seconds.labels(path).observe(time.perf_counter() - begun)
                streams = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
                figures.streams.inc(int(streams))
            await send(message)

        figures.in_flight.inc()
        try:
            await self._app(scope, receive, counting)
        finally:
            figures.in_flight.dec()
            figures.streams.dec(int(streams))
