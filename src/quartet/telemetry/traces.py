"""OpenTelemetry traces: one for each training step, across all services. Without an endpoint, OpenTelemetry is not imported.

OpenTelemetry keeps the current span in the context of the thread. One thread takes a step and starts its calls, except those to
generators in separate processes: other threads start them in a copy of its context. A background thread sends the spans in
batches. Spans that cannot be sent are dropped, which is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from quartet import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = structlog.get_logger()

PATH = "/v1/traces"
"""Path for spans at an OTLP/HTTP endpoint."""
DELAY_MS = 2000
"""Milliseconds that a batch waits for more spans."""
EXPORT_SECONDS = 5.0
"""Seconds that the export of one batch may take."""
CLOSING_SECONDS = 1.0
"""Seconds for the remaining spans at the end of the process."""

Metadata = Sequence[tuple[str, str | bytes]]
Attributes = Mapping[str, str | int]


class StepTraces(Protocol):
    """Exporter of steps and their spans."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return a context around a whole step."""

    def span(self, service: str, phase: str) -> AbstractContextManager[None]:
        """Return a context around a block of a step, on the thread that takes the step. Has no effect outside a step."""


class NoTraces:
    """``StepTraces`` when traces are off."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def span(self, service: str, phase: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


class Traces:
    """The spans of one process, and their export."""

    def __init__(self, endpoint: str, role: str, run: str) -> None:
        """``endpoint`` is the base URL for OTLP over HTTP. It does not have to be reachable yet."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Log an unreachable collector once, see _log_failures_once, instead of for each batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        endpoint = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(endpoint.removesuffix(PATH) + PATH, timeout=EXPORT_SECONDS)
        resource = Resource.create(
            {"service.namespace": "quartet", "service.name": role, "service.version": __version__, "quartet.run": run}
        )
        self._api = trace
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _log_failures_once(exporter, endpoint),
                schedule_delay_millis=DELAY_MS,
                export_timeout_millis=EXPORT_SECONDS * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("quartet", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._run = run

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace a whole step, as the root of a new trace."""
        from opentelemetry.context import Context

        attributes = {"quartet.run": self._run, "quartet.step": step}
        with self._span(f"step {step}", self._api.SpanKind.INTERNAL, attributes, Context()):
            yield

    @contextmanager
    def span(self, service: str, phase: str) -> Iterator[None]:
        """Trace a block of a step as a span named ``phase``. Has no effect outside a step."""
        if not self._api.get_current_span().get_span_context().is_valid:
            yield
            return
        with self._span(phase, self._api.SpanKind.INTERNAL, {"peer.service": str(service)}, None):
            yield

    def outgoing(self, peer: str, method: str, attributes: Attributes) -> _Outgoing | None:
        """Start the span of an outgoing call of the current context's step. Return None outside a step."""
        if not self._api.get_current_span().get_span_context().is_valid:
            return None
        span = self._tracer.start_span(
            f"{peer} {method}",
            kind=self._api.SpanKind.CLIENT,
            attributes={"rpc.system": "grpc", "rpc.method": method, "peer.service": str(peer), **attributes},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span))
        return _Outgoing(span, tuple(carrier.items()), self._finish)

    @contextmanager
    def incoming(self, service: str, method: str, metadata: Metadata, code: Callable[[], str]) -> Iterator[None]:
        """Trace the handling of an incoming call, with the trace context of the caller as parent."""
        context = self._propagator.extract({key: value for key, value in metadata if isinstance(value, str)})
        span = self._tracer.start_span(
            f"{service}/{method}",
            context,
            kind=self._api.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )
        try:
            with self._api.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            self._finish(span, code())

    def close(self) -> None:
        """Send the remaining spans, for a limited time. Must be called only once."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)

    @contextmanager
    def _span(self, name: str, kind: Any, attributes: dict[str, Any], context: Any) -> Iterator[None]:
        # The error's message may quote a response, which does not belong in a trace.
        with self._tracer.start_as_current_span(
            name, context, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException as error:
                span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
                raise

    def _finish(self, span: Span, code: str) -> None:
        span.set_attribute("rpc.grpc.status_code", code)
        if code != "OK":
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, code))
        span.end()


class _Outgoing:
    """The client span of a call."""

    def __init__(self, span: Span, metadata: Metadata, finish: Callable[[Span, str], None]) -> None:
        self._span, self.metadata, self._finish = span, metadata, finish

    def end(self, code: str, attributes: Attributes) -> None:
        """End the span with the status code of the call, and ``attributes`` of its response."""
        self._span.set_attributes(attributes)
        self._finish(self._span, code)


def _log_failures_once(exporter: SpanExporter, endpoint: str) -> SpanExporter:
    """Return the exporter with one log line when it starts to fail and one when it works again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class LogFailuresOnce(SpanExporter):
        failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:  # No failure of the export may affect the run.
                result, cause = SpanExportResult.FAILURE, type(error).__name__
            else:
                cause = "not accepted"
            failed = result is not SpanExportResult.SUCCESS
            if failed and not self.failing:
                log.warning("trace export failed", endpoint=endpoint, cause=cause)
            elif self.failing and not failed:
                log.info("trace export recovered", endpoint=endpoint)
            self.failing = failed
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return LogFailuresOnce()
