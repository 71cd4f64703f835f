"""Server interceptors: metrics of all handled calls, and trace spans on both ends of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import grpc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Histogram buckets in seconds, from a status call to the update of a step."""
OK = grpc.StatusCode.OK.name
SUBSCRIPTIONS = frozenset({"Watch", "WatchProgress"})
"""Methods that last as long as the caller wants. Their duration says nothing about the service."""

Metadata = Sequence[tuple[str, str | bytes]]
Attributes = Mapping[str, str | int]
"""Attributes of a trace span, by name."""
CallContext = Callable[[grpc.ServicerContext], AbstractContextManager[None]]
"""Function that returns the context manager around one call."""


class OutgoingSpan(Protocol):
    """Trace span of a call that this process makes."""

    metadata: Metadata
    """Metadata of the call: it carries the trace context to the service."""

    def end(self, code: str, attributes: Attributes) -> None:
        """Record the status code of the finished call, and ``attributes`` of its response. Thread-safe."""


class CallTracer(Protocol):
    """Recorder of calls as trace spans. Its methods neither raise nor block."""

    def outgoing(self, service: str, method: str, attributes: Attributes) -> OutgoingSpan | None:
        """Start the span of a call that this process makes; None if the caller's context has no trace."""

    def incoming(
        self, service: str, method: str, metadata: Metadata, code: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Return the span around a handled call. ``code`` returns the status code once the call has ended."""


class CallInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Base class of interceptors that put a context manager around each call."""

    def context_of(self, service: str, method: str, metadata: Metadata) -> CallContext | None:
        """Return a function that creates the context manager of a call; None for no context manager."""
        raise NotImplementedError

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the method."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.strip("/").rpartition("/")
        around = self.context_of(service, method, handler_call_details.invocation_metadata or ())
        if around is None:
            return handler
        return wrap_handler(
            handler,
            lambda behaviour: _unary_inside(behaviour, around),
            lambda behaviour: _stream_inside(behaviour, around),
        )


def wrap_handler(
    handler: grpc.RpcMethodHandler[Any, Any],
    unary: Callable[[Callable[..., Any]], Callable[..., Any]],
    stream: Callable[[Callable[..., Any]], Callable[..., Any]],
    parse: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler[Any, Any] | None:
    """Return a handler with a wrapped behaviour and, if given, another parser.

    Returns None for a method with a request stream. The contract has no such method, so it must not be reachable unguarded.
    """
    parse = parse or handler.request_deserializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), parse, handler.response_serializer)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), parse, handler.response_serializer)
    return None


def _unary_inside(behaviour: Callable[..., Any], around: CallContext) -> Callable[..., Any]:
    def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
        with around(context):
            return behaviour(request, context)

    return wrapped


def _stream_inside(behaviour: Callable[..., Any], around: CallContext) -> Callable[..., Any]:
    def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
        with around(context):
            yield from behaviour(request, context)

    return wrapped


class CallMetrics(CallInterceptor):
    """Interceptor that counts calls by service, method and status code, and measures their duration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Imported here: clients import this module too, and do not need prometheus_client.
        from prometheus_client import Counter, Gauge, Histogram

        self._requests = Counter(
            "quartet_rpc_requests_total",
            "Handled calls, by gRPC status code.",
            ("service", "method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "quartet_rpc_seconds",
            "Duration of a call in seconds, including the wait for the compute thread. Excludes subscriptions.",
            ("service", "method"),
            buckets=BUCKETS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "quartet_rpc_in_flight", "Calls in progress, including subscriptions.", registry=registry
        )

    def context_of(self, service: str, method: str, metadata: Metadata) -> CallContext:
        """Return a function that creates a context manager, which counts and measures a call."""

        @contextmanager
        def measured(context: grpc.ServicerContext) -> Iterator[None]:
            start, code = time.perf_counter(), grpc.StatusCode.UNKNOWN.name
            self._in_flight.inc()
            try:
                yield
                code = code_of_success(context)
            except BaseException:
                code = code_of_failure(context)
                raise
            finally:
                self._in_flight.dec()
                self._requests.labels(service, method, code).inc()
                if method not in SUBSCRIPTIONS:
                    self._seconds.labels(service, method).observe(time.perf_counter() - start)

        return measured


class CallTraces(CallInterceptor):
    """Interceptor that adds a span to each call that belongs to a trace."""

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer

    def context_of(self, service: str, method: str, metadata: Metadata) -> CallContext | None:
        """Return a function that creates a span, or None if the caller sent no trace context."""
        if not any(key == "traceparent" for key, _ in metadata):
            return None

        @contextmanager
        def traced(context: grpc.ServicerContext) -> Iterator[None]:
            code = grpc.StatusCode.UNKNOWN.name
            with self._tracer.incoming(service, method, metadata, lambda: code):
                try:
                    yield
                    code = code_of_success(context)
                except BaseException:
                    code = code_of_failure(context)
                    raise

        return traced


def code_of_success(context: grpc.ServicerContext) -> str:
    """Return the status code of a call whose handler returned: CANCELLED if the caller was gone by then."""
    return OK if context.is_active() else grpc.StatusCode.CANCELLED.name


def code_of_failure(context: grpc.ServicerContext) -> str:
    """Return the status code of a call whose handler raised, as ``ErrorInterceptor`` has set it; CANCELLED if the caller left."""
    code = context.code()  # type: ignore[attr-defined]
    if isinstance(code, grpc.StatusCode):
        return code.name
    return (grpc.StatusCode.UNKNOWN if context.is_active() else grpc.StatusCode.CANCELLED).name
