"""Calling a service: every call has a deadline, every failure becomes a domain exception that names the service."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from quartet.errors import AccessRefused, Cancelled, ConfigError, MismatchError, QuartetError, ServiceUnavailable
from quartet.rpc.call_observers import CallTracer
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.status_codes import error_of
from quartet.v1 import status_pb2, status_pb2_grpc

Response = TypeVar("Response")

log = structlog.get_logger()

TELL_AFTER, TELL_EVERY = 5.0, 60.0
"""Seconds after which, and between which, a process says in its log whom it waits for."""
FOREIGN_AFTER = 8.0
"""Seconds for which a port may accept connections without speaking Quartet before it counts as something else."""
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ServiceChannel:
    """One service at one address."""

    def __init__(self, name: str, address: str, credentials: Credentials = LOCAL) -> None:
        """``name`` is the role that answers there."""
        self.name = name
        self.address = address
        self._credentials = credentials
        self.channel = credentials.channel(name, address)
        # Made once: gRPC 1.81 may end the process where a stub is made of a channel that another thread has just closed.
        self._status = status_pb2_grpc.StatusServiceStub(self.channel)
        self.tracer: CallTracer | None = None
        """Takes notice of the calls that are begun with ``start``."""

    def call(self, method: Callable[..., Response], request: Any, timeout: float, title: str) -> Response:
        """Calls a stub's method. ``timeout`` is in seconds. Raises the domain exception of the answer's status code."""
        try:
            return method(request, timeout=timeout, metadata=self._credentials.metadata)
        except grpc.RpcError as error:
            raise self._error(error, title, timeout) from None

    def start(self, method: Any, request: Any, timeout: float, title: str) -> PendingCall:
        """Begins a call without waiting for its answer."""
        span = self.tracer.outgoing(self.name, title) if self.tracer is not None else None
        metadata = (*self._credentials.metadata, *(span.metadata if span is not None else ()))
        future = method.future(request, timeout=timeout, metadata=metadata)
        if span is not None:
            future.add_done_callback(lambda ended: span.end(ended.code().name))
        return PendingCall(self, future, title, timeout)

    def _error(self, error: grpc.RpcError, title: str, timeout: float) -> QuartetError:
        return error_of(error, f"{self.name} at {self.address}: {title}", timeout)

    def wait_until_ready(
        self, timeout: float, alive: Callable[[], None] = lambda: None, known: bool = False
    ) -> status_pb2.GetStatusResponse:
        """The status, as soon as the service answers; ``alive`` may raise to end the wait.

        Raises ServiceUnavailable after ``timeout`` seconds, ConfigError when something else than gRPC answers there, unless it is
        ``known`` to be a Quartet service.
        """
        deadline = time.monotonic() + timeout
        silent_since: float | None = None
        telling = time.monotonic() + TELL_AFTER
        while True:
            alive()
            try:
                return self.call(self._status.GetStatus, status_pb2.GetStatusRequest(), 2.0, "GetStatus")
            except AccessRefused:
                raise
            except QuartetError as error:
                now = time.monotonic()
                if now > telling:
                    log.info("waiting for a service", service=self.name, address=self.address)
                    telling = now + TELL_EVERY
                if not isinstance(error, MismatchError) and not accepts_connections(self.address):
                    silent_since = None
                elif silent_since is None:
                    silent_since = now
                foreign = isinstance(error, MismatchError) or (
                    silent_since is not None and now - silent_since > FOREIGN_AFTER
                )
                if foreign and not known:
                    raise ConfigError(
                        f"{self.name} at {self.address}: what answers there is not a Quartet service, or one with other "
                        f"certificates; check services.{self.name}.address, and security.certificates on both sides"
                    ) from None
                if now > deadline:
                    raise ServiceUnavailable(
                        f"{self.name} at {self.address}: no Quartet service answered within {timeout:g} s; "
                        f"start it, or correct services.{self.name}.address"
                    ) from None
            time.sleep(0.1)

    def answers(self, timeout: float) -> bool:
        """Whether the service answers within ``timeout`` seconds, with whatever."""
        try:
            # Waits for the connection: one that was lost comes back only after a while.
            self._status.GetStatus(
                status_pb2.GetStatusRequest(), timeout=timeout, wait_for_ready=True, metadata=self._credentials.metadata
            )
        except grpc.RpcError as error:
            return error.code() not in _SILENT
        except ValueError:  # The channel has been closed meanwhile.
            return False
        return True

    def again(self) -> ServiceChannel:
        """The same over a new connection."""
        return ServiceChannel(self.name, self.address, self._credentials)

    def close(self) -> None:
        """Closes the channel."""
        self.channel.close()


def replicas_at(address: str) -> int:
    """Processes behind HOST:PORT, or behind gRPC's own list of them, to which a channel sends calls in turn; at least 1.

    A name may stand for several addresses. One that cannot be looked up now counts as one process: the call says what is wrong.
    """
    if address.startswith(("ipv4:", "ipv6:")):
        return len(address.split(","))
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return 1
    # A process may have an address of each family.
    return max(Counter(family for family, *_ in found).values())


def accepts_connections(address: str) -> bool:
    """Whether anything listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


class ToldAtOnce:
    """A unary method whose initial metadata is there when it comes.

    gRPC for Python has a unary call's only with its answer, and a stream's when they come; to the service the two are the same.
    """

    def __init__(self, channel: grpc.Channel, method: str, response: type[Message]) -> None:
        """``method`` is /PACKAGE.SERVICE/NAME."""
        self._call: Any = channel.unary_stream(
            method,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=response.FromString,
        )

    def future(self, request: Message, timeout: float, metadata: Sequence[tuple[str, str]]) -> AnswerToCome:
        """Begins a call."""
        return AnswerToCome(self._call(request, timeout=timeout, metadata=metadata))


class AnswerToCome:
    """The one answer of a stream, as gRPC's futures have a unary call's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._answer: Future[Any] = Future()
        threading.Thread(target=self._read, name="answer", daemon=True).start()

    def _read(self) -> None:
        try:
            [answer] = self._stream
        except Exception as error:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(answer)

    def initial_metadata(self) -> Any:
        """Waits for the service's initial metadata, or for the end of the call."""
        return self._stream.initial_metadata()

    def done(self) -> bool:
        """Whether the answer, or the failure, is there."""
        return self._answer.done()

    def code(self) -> grpc.StatusCode:
        """Of the call that has ended."""
        found: grpc.StatusCode = self._stream.code()
        return found

    def add_done_callback(self, heard: Callable[[AnswerToCome], None]) -> None:
        """Has ``heard`` called when the answer or the failure is there; at once if it is."""
        self._answer.add_done_callback(lambda _: heard(self))

    def result(self) -> Any:
        """The answer. Raises grpc.RpcError."""
        return self._answer.result()

    def cancel(self) -> None:
        """Ends the call."""
        self._stream.cancel()


class PendingCall:
    """A call under way."""

    def __init__(self, peer: ServiceChannel, future: Any, title: str, timeout: float) -> None:
        self._peer, self._future, self._title, self._timeout = peer, future, title, timeout

    def done(self) -> bool:
        """Whether the answer, or the failure, is there."""
        return bool(self._future.done())

    def when_done(self, heard: Callable[[], None]) -> None:
        """Has ``heard`` called, by another thread, when the answer or the failure is there; at once if it is."""
        self._future.add_done_callback(lambda _: heard())

    def wait_until_begun(self) -> None:
        """Returns when the service has sent its initial metadata, or when the call has ended; at once only of ``ToldAtOnce``."""
        self._future.initial_metadata()

    def result(self) -> Any:
        """The answer. Raises the domain exception of its status code."""
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._peer._error(error, self._title, self._timeout) from None
        except grpc.FutureCancelledError:
            raise Cancelled(f"{self._peer.name}: {self._title}: cancelled") from None

    def cancel(self) -> None:
        """Tells the service that nobody waits any more."""
        self._future.cancel()
