"""Watching calls: figures of every call that a server answers, and spans on both of its ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import grpc

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Seconds: from a look at the status to a step's update."""
OK = grpc.StatusCode.OK.name

Metadata = Sequence[tuple[str, str | bytes]]
Watched = Callable[[grpc.ServicerContext], AbstractContextManager[None]]


class OutgoingSpan(Protocol):
    """A call that goes out from here."""

    metadata: Metadata
    """What goes with the call, so that its other end knows what it belongs to."""

    def end(self, code: str) -> None:
        """The answer is there, with this status code. May be called on any thread."""


class CallTracer(Protocol):
    """Who takes notice of calls. None of it may raise, or wait."""

    def outgoing(self, peer: str, method: str) -> OutgoingSpan | None:
        """A call begins; None where it belongs to nothing that is traced."""

    def incoming(
        self, service: str, method: str, metadata: Metadata, code: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Around the work on a call, on the thread that does it. ``code`` gives its status code, once it has ended."""


class Observer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Puts something around every call that a server answers."""

    def watch(self, service: str, method: str, streams: bool, metadata: Metadata) -> Watched | None:
        """What goes around a call; None for nothing."""
        raise NotImplementedError

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.strip("/").rpartition("/")
        watched = self.watch(
            service, method, bool(handler.unary_stream), handler_call_details.invocation_metadata or ()
        )
        if watched is None:
            return handler
        return wrapped(
            handler, lambda behaviour: _around(behaviour, watched), lambda behaviour: _around_stream(behaviour, watched)
        )


def wrapped(
    handler: grpc.RpcMethodHandler[Any, Any],
    unary: Callable[[Callable[..., Any]], Callable[..., Any]],
    stream: Callable[[Callable[..., Any]], Callable[..., Any]],
    parse: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler[Any, Any] | None:
    """A method's handler with something around its behaviour, and another parser. None for one that takes a stream: the contract
    has no such method, so nobody is to reach it unguarded.
    """
    parse = parse or handler.request_deserializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), parse, handler.response_serializer)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), parse, handler.response_serializer)
    return None


def _around(behaviour: Callable[..., Any], watched: Watched) -> Callable[..., Any]:
    def observed(request: Any, context: grpc.ServicerContext) -> Any:
        with watched(context):
            return behaviour(request, context)

    return observed


def _around_stream(behaviour: Callable[..., Any], watched: Watched) -> Callable[..., Any]:
    def observed(request: Any, context: grpc.ServicerContext) -> Any:
        with watched(context):
            yield from behaviour(request, context)

    return observed


class CallMetrics(Observer):
    """Counts the calls of a process by service, method and code, and measures how long they take."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Not above: whoever calls a service imports this module, and needs none of it.
        from prometheus_client import Counter, Gauge, Histogram

        self._requests = Counter(
            "quartet_rpc_requests_total",
            "Calls that were answered, by gRPC status code.",
            ("service", "method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "quartet_rpc_seconds",
            "From the arrival of a call to its answer, the wait for the compute thread included; streams left out.",
            ("service", "method"),
            buckets=BUCKETS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "quartet_rpc_in_flight", "Calls that are being answered, streams included.", registry=registry
        )

    def watch(self, service: str, method: str, streams: bool, metadata: Metadata) -> Watched:
        """Counts and measures."""

        @contextmanager
        def measured(context: grpc.ServicerContext) -> Iterator[None]:
            start, code = time.perf_counter(), grpc.StatusCode.UNKNOWN.name
            self._in_flight.inc()
            try:
                yield
                code = code_of_answer(context)
            except BaseException:
                code = code_of_failure(context)
                raise
            finally:
                self._in_flight.dec()
                self._requests.labels(service, method, code).inc()
                if not streams:
                    self._seconds.labels(service, method).observe(time.perf_counter() - start)

        return measured


class CallTraces(Observer):
    """Gives each call that belongs to a trace a span."""

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer

    def watch(self, service: str, method: str, streams: bool, metadata: Metadata) -> Watched | None:
        """A span, where the caller sent what it belongs to."""
        if not any(key == "traceparent" for key, _ in metadata):
            return None

        @contextmanager
        def traced(context: grpc.ServicerContext) -> Iterator[None]:
            ended = [grpc.StatusCode.UNKNOWN.name]
            with self._tracer.incoming(service, method, metadata, lambda: ended[0]):
                try:
                    yield
                    ended[0] = code_of_answer(context)
                except BaseException:
                    ended[0] = code_of_failure(context)
                    raise

        return traced


def code_of_answer(context: grpc.ServicerContext) -> str:
    """The status code of a call whose work came to its end."""
    # Nobody heard the answer of a call that was let go of meanwhile.
    return OK if context.is_active() else grpc.StatusCode.CANCELLED.name


def code_of_failure(context: grpc.ServicerContext) -> str:
    """The status code of a call whose work raised something: what the translation of errors has set."""
    code = context.code()  # type: ignore[attr-defined]
    return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN.name
