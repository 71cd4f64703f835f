"""Prometheus metrics of the gateway itself."""

from __future__ import annotations

import time

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.telemetry.prometheus import process_registry

LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
METHODS = ("GET", "POST", "PATCH")


class GatewayMetrics:
    """The gateway's metrics, in a separate registry, so that several gateways can run in one process."""

    def __init__(self) -> None:
        self._registry = process_registry("gateway")
        self.requests = Counter(
            "quartet_gateway_requests",
            "HTTP requests that got a response.",
            ["method", "path", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "quartet_gateway_request_seconds",
            "Time from the request to the start of its response, in seconds.",
            ["path"],
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "quartet_gateway_requests_in_flight",
            "Active HTTP requests, including event streams.",
            registry=self._registry,
        )
        self.streams = Gauge("quartet_gateway_event_streams", "Open event streams.", registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class RequestMetrics:
    """Middleware that counts requests, and measures the time until their response starts; event streams last much longer."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, started, is_stream = self._metrics, time.perf_counter(), False

        async def record(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                # Labels are route patterns and known methods: paths and methods of clients are unbounded.
                path = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                metrics.requests.labels(method, path, message["status"]).inc()
                metrics.seconds.labels(path).observe(time.perf_counter() - started)
                is_stream = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
                metrics.streams.inc(int(is_stream))
            await send(message)

        metrics.in_flight.inc()
        try:
            await self._app(scope, receive, record)
        finally:
            metrics.in_flight.dec()
            metrics.streams.dec(int(is_stream))
