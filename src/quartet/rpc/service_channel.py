"""A connection to one service. Every failed call raises a domain exception that names the service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.codec.messages import from_message
from quartet.contract.status import ProcessStatus
from quartet.errors import AccessRefused, Cancelled, ConfigError, MismatchError, QuartetError, ServiceUnavailable
from quartet.rpc.call_interceptors import OK, Attributes, CallTracer, OutgoingSpan
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.status_codes import error_of
from quartet.v1 import status_pb2, status_pb2_grpc

Response = TypeVar("Response")
Result = TypeVar("Result")

log = structlog.get_logger()

LOG_AFTER, LOG_INTERVAL = 5.0, 60.0
"""Seconds before the first log line about a service that is not ready, and between later ones."""
FOREIGN_AFTER = 8.0
"""Seconds for which a port may accept connections without a response before it counts as another kind of server."""
POLL = 0.1
"""Seconds between two attempts to get a status."""
SILENCE_SECONDS = 60.0
"""Seconds without a message after which a stream that sends one every 5 seconds counts as lost."""
STATUS_TIMEOUT = 2.0
"""Seconds for one attempt to get a status."""
_REFUSAL_CODES = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Codes that tell of a wrong address or credential at the first contact. Later, a proxy or a restarting process sends them."""
_NO_RESPONSE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Call(Future[Result]):
    """A call in progress. It ends with Cancelled after ``cancel``, once the service knows of it and may stop its work."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelling = False
        self._abort: Callable[[], object] = lambda: None

    def on_cancel(self, abort: Callable[[], object]) -> None:
        """Set what ``cancel`` does from now on. Does it at once after ``cancel``."""
        self._abort = abort
        if self.cancelling:
            abort()

    def cancel(self) -> bool:
        """Cancel the call."""
        self.cancelling = True
        self._abort()
        return True


class _Silence:
    """Calls ``on_end`` on another thread after SILENCE_SECONDS in which the stream was waited for. Use it on one thread."""

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self._ended = threading.Event()
        self._since: float | None = None
        self.over = False

    def __enter__(self) -> _Silence:
        self._since = time.monotonic()
        threading.Thread(target=self._watch, name="silence of a stream", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no silence in this block, and from its end anew."""
        self._since = None
        yield
        self._since = time.monotonic()

    def _watch(self) -> None:
        remaining = SILENCE_SECONDS
        while not self._ended.wait(remaining):
            since = self._since
            remaining = SILENCE_SECONDS if since is None else since + SILENCE_SECONDS - time.monotonic()
            if remaining <= 0:
                self.over = True
                self._on_end()
                return


class ServiceChannel:
    """Connection to one service at one address."""

    def __init__(self, name: str, address: str, credentials: Credentials = LOCAL) -> None:
        """``name`` is the role expected at ``address``."""
        self.name = name
        self.address = address
        self.address_key = f"services.{name}.address"
        """Config key of the address, for messages."""
        self._credentials = credentials
        self.grpc_channel = credentials.channel(name, address)
        # Created once: gRPC 1.81 may abort the process if a stub is created on a channel that another thread has just closed.
        self._status = status_pb2_grpc.StatusServiceStub(self.grpc_channel)
        self._health = health_pb2_grpc.HealthStub(self.grpc_channel)
        self._has_responded = False
        self.tracer: CallTracer | None = None
        """Tracer of the calls made with ``start`` and ``start_stream``."""

    def call(self, method: Callable[..., Response], request: Any, timeout: float, title: str) -> Response:
        """Call a method of a stub and wait for its response.

        ``timeout`` is in seconds. Raises the exception that the service raised, Cancelled if this channel is closed.
        """
        try:
            return method(request, timeout=timeout, metadata=self._credentials.metadata)
        except grpc.RpcError as error:
            raise self._error(error, title, timeout) from None
        except ValueError:
            raise self._closed(title) from None

    def start(
        self,
        method: Any,
        request: Any,
        timeout: float,
        title: str,
        convert: Callable[[Any], Result],
        attributes: Attributes | None = None,
        response_attributes: Callable[[Any], Attributes] = lambda response: {},
    ) -> Future[Result]:
        """Start a call of a unary method. Raises Cancelled if the channel is closed.

        The result is the response as ``convert`` returns it. It raises what the service raised, or Cancelled after ``cancel``.
        ``attributes`` and ``response_attributes`` are added to the span of the call.
        """
        metadata, span = self._traced(title, attributes)
        try:
            future = method.future(request, timeout=timeout, metadata=metadata)
        except ValueError:
            raise self._closed(title) from None
        if span is not None:
            future.add_done_callback(lambda ended: _end_span(span, ended, response_attributes))
        call = Call[Result]()
        call.on_cancel(future.cancel)
        future.add_done_callback(lambda ended: self._end(call, ended.result, convert, title, timeout))
        return call

    def start_stream(
        self,
        method: Any,
        request: Any,
        timeout: float,
        title: str,
        convert: Callable[[Any], Result],
        attributes: Attributes | None = None,
        on_message: Callable[[Any], None] = lambda message: None,
    ) -> Future[Result]:
        """Start a call of a server-streaming method, whose result is the last message. A separate thread reads its messages and
        calls ``on_message``. See ``start`` for the rest. ServiceUnavailable after SILENCE_SECONDS without a message.
        """
        metadata, span = self._traced(title, attributes)
        try:
            stream = method(request, timeout=timeout, metadata=metadata)
        except ValueError:
            raise self._closed(title) from None
        call = Call[Result]()
        call.on_cancel(stream.cancel)
        if span is not None:
            call.add_done_callback(lambda _: span.end(stream.code().name, {}))

        silence = _Silence(stream.cancel)

        def last_message() -> Any:
            message: Any = None
            try:
                with silence:
                    for message in stream:
                        with silence.paused():
                            on_message(message)
            except Exception:
                if silence.over:
                    unavailable = ServiceUnavailable(
                        f"{self.name} at {self.address}: {title}: no message for {SILENCE_SECONDS:g} s"
                    )
                    unavailable.service = f"{self.name} at {self.address}"
                    raise unavailable from None
                if stream.cancelled():
                    raise grpc.FutureCancelledError from None
                raise
            return message

        arguments = (call, last_message, convert, title, timeout)
        threading.Thread(target=self._end, args=arguments, name="stream", daemon=True).start()
        return call

    def stream(self, method: Any, request: Any, title: str, timeout: float | None = None) -> Generator[Any, None, None]:
        """Yield the messages of a server-streaming method. Raises as ``call``.

        ``timeout``: seconds for the whole stream; None for no deadline. Closing the iterator cancels the call.
        """
        responses = None
        try:
            responses = method(request, timeout=timeout, metadata=self._credentials.metadata)
            yield from responses
        except grpc.RpcError as error:
            raise self._error(error, title, timeout or 0.0) from None
        except ValueError:
            raise self._closed(title) from None
        finally:
            if responses is not None:
                responses.cancel()

    def status(self, timeout: float = STATUS_TIMEOUT) -> ProcessStatus:
        """Return the status of the process. Raises as ``call``."""
        response = self.call(self._status.GetStatus, status_pb2.GetStatusRequest(), timeout, "GetStatus")
        self._has_responded = True
        return from_message(ProcessStatus, response)

    def start_status(self, convert: Callable[[ProcessStatus], Result]) -> Future[Result]:
        """Start to ask for the status of the process. Raises Cancelled if the channel is closed."""
        return self.start(
            self._status.GetStatus,
            status_pb2.GetStatusRequest(),
            STATUS_TIMEOUT,
            "GetStatus",
            lambda response: convert(from_message(ProcessStatus, response)),
        )

    def is_serving(self, timeout: float = STATUS_TIMEOUT) -> bool:
        """Return whether the process reports itself as serving. Raises as ``call``."""
        response = self.call(self._health.Check, health_pb2.HealthCheckRequest(), timeout, "Check")
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_ready(
        self, timeout: float, check_alive: Callable[[], None] = lambda: None, known: bool = False
    ) -> ProcessStatus:
        """Wait until the service responds and return its status. ``check_alive`` may raise to end the wait.

        ``known``: the address belongs to a Quartet service that was ready before. Raises ServiceUnavailable after ``timeout``
        seconds, ConfigError if another kind of server responds at an address that is not ``known``.
        """
        deadline = time.monotonic() + timeout
        accepting_since: float | None = None
        next_log = time.monotonic() + LOG_AFTER
        while True:
            check_alive()
            try:
                return self.status()
            except AccessRefused:
                raise
            except QuartetError as error:
                now = time.monotonic()
                if now > next_log:
                    log.info("waiting for a service", service=self.name, address=self.address, timeout_seconds=timeout)
                    next_log = now + LOG_INTERVAL
                if not isinstance(error, MismatchError) and not accepts_connections(self.address):
                    accepting_since = None
                elif accepting_since is None:
                    accepting_since = now
                foreign = isinstance(error, MismatchError) or (
                    accepting_since is not None and now - accepting_since > FOREIGN_AFTER
                )
                if foreign and not known:
                    raise ConfigError(
                        f"{self.name} at {self.address}: the server there is not a Quartet service, or it has other "
                        f"certificates; check {self.address_key}, and security.certificates on both sides"
                    ) from None
                if now > deadline:
                    raise ServiceUnavailable(
                        f"{self.name} at {self.address}: no Quartet service responded within {timeout:g} s; "
                        f"start it, or correct {self.address_key}"
                    ) from None
            time.sleep(POLL)

    def responds(self, timeout: float) -> bool:
        """Return whether the service responds within ``timeout`` seconds, even with an error."""
        try:
            # wait_for_ready: a lost connection is re-established only after a backoff.
            self._status.GetStatus(
                status_pb2.GetStatusRequest(), timeout=timeout, wait_for_ready=True, metadata=self._credentials.metadata
            )
        except grpc.RpcError as error:
            return error.code() not in _NO_RESPONSE_CODES
        except ValueError:  # The channel is closed.
            return False
        return True

    def reconnected(self) -> ServiceChannel:
        """Return a new channel to the same service. A lost connection waits before it reconnects."""
        return ServiceChannel(self.name, self.address, self._credentials)

    def close(self) -> None:
        """Close the connection."""
        self.grpc_channel.close()

    def _traced(
        self, title: str, attributes: Attributes | None
    ) -> tuple[tuple[tuple[str, str | bytes], ...], OutgoingSpan | None]:
        span = None
        if self.tracer is not None:
            span = self.tracer.outgoing(self.name, title, {"server.address": self.address, **(attributes or {})})
        return (*self._credentials.metadata, *(span.metadata if span is not None else ())), span

    def _end(
        self,
        call: Future[Result],
        response: Callable[[], Any],
        convert: Callable[[Any], Result],
        title: str,
        timeout: float,
    ) -> None:
        """End a call with its converted ``response``, or with the error of its failure."""
        try:
            result = convert(response())
        except grpc.RpcError as error:
            call.set_exception(self._late_error(error, title, timeout))
        except grpc.FutureCancelledError:
            call.set_exception(Cancelled(f"{self.name}: {title}: cancelled"))
        except Exception as error:
            call.set_exception(error)
        else:
            call.set_result(result)

    def _error(self, error: grpc.RpcError, title: str, timeout: float) -> QuartetError:
        service = f"{self.name} at {self.address}"
        failure = error_of(error, f"{service}: {title}", timeout)
        failure.service = service
        return failure

    def _late_error(self, error: grpc.RpcError, title: str, timeout: float) -> QuartetError:
        """Return the error of a call. A refusal by a service that has responded before is a fault, and not one of the config.

        The next status call decides: it raises AccessRefused if the service still refuses.
        """
        failure = self._error(error, title, timeout)
        if self._has_responded and error.code() in _REFUSAL_CODES:
            unavailable = ServiceUnavailable(str(failure))
            unavailable.service = failure.service
            return unavailable
        return failure

    def _closed(self, title: str) -> QuartetError:
        return Cancelled(f"{self.name} at {self.address}: {title}: the channel is closed")


def _end_span(span: OutgoingSpan, ended: Any, response_attributes: Callable[[Any], Attributes]) -> None:
    """End the span of a unary call that has ended."""
    code = ended.code().name
    span.end(code, response_attributes(ended.result()) if code == OK else {})


def endpoints_at(address: str) -> list[str]:
    """Return the address of each process behind HOST:PORT, whose host name may resolve to several.

    A name with one address stays as it is. Empty if the name does not resolve.
    """
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    # One process may have an address in each family.
    hosts: dict[int, set[str]] = {}
    for family, *_, location in resolved:
        hosts.setdefault(family, set()).add(str(location[0]))
    most = max(hosts.values(), key=len)
    return (
        [address] if len(most) < 2 else sorted(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in most)
    )


def accepts_connections(address: str) -> bool:
    """Return whether a server listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
