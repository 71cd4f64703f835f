"""One server builder for every process: health, status, error translation, limits, graceful drain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quartet import __version__, codec
from quartet.errors import ConfigError, InvalidRequest, ServiceBusy
from quartet.rpc.call_observers import Observer, wrapped
from quartet.rpc.health import HealthListener
from quartet.rpc.limits import MAX_CONCURRENT_CALLS, MAX_STREAMS, SERVER_OPTIONS, WORKERS
from quartet.rpc.security.credentials import LOCAL, AccessControl, Credentials
from quartet.rpc.status_codes import status_of
from quartet.topology import is_loopback
from quartet.types import Role, ServiceStatus
from quartet.v1 import status_pb2, status_pb2_grpc

log = structlog.get_logger()


class HostedRole(Protocol):
    """One role of a process, as the server sees it."""

    role: Role

    def status(self) -> ServiceStatus:
        """What the role says of itself; must not wait for model work."""

    def register(self, server: grpc.Server) -> None:
        """Adds the role's servicer."""

    def abandoned(self) -> tuple[str, float]:
        """Work in hand whose caller is gone, and for how many seconds it has gone on after its deadline; "" and 0 for nothing."""

    def close(self) -> None:
        """Called once, after the last call has ended."""


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Answers for all roles of the process."""

    def __init__(self, roles: Sequence[HostedRole], metrics_address: str = "") -> None:
        self._roles, self._metrics_address = roles, metrics_address

    def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> status_pb2.GetStatusResponse:
        """What this process is and has done."""
        statuses = [codec.status_to_proto(role.status()) for role in self._roles]
        return status_pb2.GetStatusResponse(roles=statuses, version=__version__, metrics_address=self._metrics_address)


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Turns domain exceptions into status codes. The cause goes to the log, only safe text leaves the process.

    And bounds the streams of the process: each holds a thread for as long as its caller likes.
    """

    def __init__(self) -> None:
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return wrapped(
            handler,
            lambda behaviour: self._guard(behaviour, method),
            lambda behaviour: self._guard_stream(behaviour, method),
            _parser(handler.request_deserializer),
        )

    @staticmethod
    def _guard(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(_whole(request), context)
            except Exception as error:
                _abort(error, method, context)

        return guarded

    def _guard_stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        def bounded(request: Any, context: grpc.ServicerContext) -> Any:
            if not self._streams.acquire(blocking=False):
                raise ServiceBusy(f"{MAX_STREAMS} streams are open already; close some")
            try:
                yield from behaviour(_whole(request), context)
            finally:
                self._streams.release()

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                yield from bounded(request, context)
            except Exception as error:
                _abort(error, method, context)

        return guarded


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Reads a message, or gives the reason why it cannot be read: gRPC by itself would call that an internal error."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return parse


def _whole(request: Any) -> Any:
    if isinstance(request, DecodeError):
        raise InvalidRequest(f"request: not the message that this method takes ({request})")
    return request


def _abort(error: Exception, method: str, context: grpc.ServicerContext) -> None:
    status = rpc_status.to_status(status_of(error))
    if status.code is grpc.StatusCode.INTERNAL:
        log.error("call failed", method=method, code=status.code.name, exc_info=error)
    else:
        log.warning("call refused", method=method, code=status.code.name, error=status.details)
    context.abort_with_status(status)


class Server:
    """A listening gRPC server for the given roles. It answers health and status from its start to its end."""

    def __init__(
        self,
        roles: Sequence[HostedRole],
        listen: str,
        credentials: Credentials = LOCAL,
        observers: Sequence[Observer] = (),
        metrics_address: str = "",
        health_listen: str | None = None,
    ) -> None:
        """Binds and starts. ``observers`` see every call; ``metrics_address`` is told to whoever asks for the status.

        ``health_listen``: HOST:PORT that answers health checks alone, for probes. Raises ConfigError when an address is taken or
        invalid, or not loopback without certificates or leave.
        """
        if not credentials.encrypted:
            check_listen_address(listen, credentials.allow_plaintext)
        self._roles = roles
        self._stopping = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="rpc"),
            interceptors=[*observers, AccessControl(credentials), ErrorInterceptor()],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(StatusServicer(roles, metrics_address), self._server)
        for role in roles:
            role.register(self._server)
        host = listen.rpartition(":")[0]
        port = credentials.listen(self._server, listen)
        if port == 0:
            raise ConfigError(
                f"listen {listen}: the port is taken or the address is not this machine's; "
                "stop what listens there or choose another port"
            )
        self.address = f"{host}:{port}"
        self._server.start()
        for name in ("", *(f"quartet.v1.{role.role.capitalize()}Service" for role in roles)):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._probes: HealthListener | None = None
        if health_listen is not None:
            try:
                self._probes = HealthListener(self._health, health_listen)
            except ConfigError:
                self._server.stop(grace=None).wait()
                raise

    @property
    def health_address(self) -> str | None:
        """HOST:PORT that answers health checks alone, if any."""
        return self._probes.address if self._probes is not None else None

    def stop(self, drain: float) -> None:
        """Refuses new calls, gives those in hand ``drain`` seconds, then closes the roles. May be called once."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=drain).wait()
        if self._probes is not None:
            self._probes.stop()
        for role in self._roles:
            role.close()


def check_listen_address(listen: str, allow_plaintext: bool) -> None:
    """Refuses to listen beyond loopback in plaintext unless told so in words. Raises ConfigError."""
    if not allow_plaintext and not is_loopback(listen.rpartition(":")[0]):
        raise ConfigError(
            f"listen {listen}: not a loopback address, and calls are not encrypted; listen on 127.0.0.1, give "
            "security.certificates, or set security.allow_plaintext true inside a network that you trust"
        )
