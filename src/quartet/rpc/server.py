"""The gRPC server of every process: health, status, errors on the wire, limits, and graceful shutdown."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quartet import __version__
from quartet.codec.messages import to_message
from quartet.config.layout import check_listen_address
from quartet.contract.status import DeviceReading, ProcessStatus, Role, ServiceStatus
from quartet.errors import ConfigError, InvalidRequest, ServiceBusy
from quartet.rpc.call_interceptors import CallInterceptor, wrap_handler
from quartet.rpc.health import HealthListener, HealthServicer
from quartet.rpc.limits import MAX_STREAMS, CallLimits
from quartet.rpc.security.allow_list import CALLERS
from quartet.rpc.security.credentials import LOCAL, AccessControl, Credentials
from quartet.rpc.status_codes import status_of
from quartet.v1 import status_pb2, status_pb2_grpc

log = structlog.get_logger()

BIND_INTERVAL = 0.1
"""Seconds between attempts to bind a port that is in use."""
NOTICE_SECONDS = 1.0
"""Time that health watches have at a drain to report the shutdown."""


class HostedRole(Protocol):
    """Servicer of one role of the process."""

    role: Role

    def status(self) -> ServiceStatus:
        """Return the role's status without waiting for model work."""

    def register(self, server: grpc.Server) -> None:
        """Add the servicer to a server."""

    def abandoned(self) -> tuple[str, float]:
        """Return the kind of running work whose caller is gone, and the seconds since its deadline; ("", 0) for none."""

    def close(self) -> None:
        """Release resources. Called once, after the last call has ended."""


@runtime_checkable
class StreamingRole(Protocol):
    """A role with streams that last until something happens."""

    def end_streams(self) -> None:
        """End these streams. Called when new calls are refused."""


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """StatusService for all roles of the process."""

    def __init__(
        self,
        roles: Sequence[HostedRole],
        metrics_address: str = "",
        devices: Callable[[], tuple[DeviceReading, ...]] = tuple,
    ) -> None:
        self._roles, self._metrics_address, self._devices = roles, metrics_address, devices
        self._instance_id = secrets.token_hex(8)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the status of the process."""
        roles = tuple(role.status() for role in self._roles)
        return to_message(
            status_pb2.GetStatusResponse,
            ProcessStatus(roles, __version__, self._metrics_address, self._instance_id, self._devices()),
        )


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that maps exceptions to status codes and limits the number of open streams.

    The log has the cause of an unforeseen exception; its text does not leave the process.
    """

    def __init__(self) -> None:
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the method."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return wrap_handler(
            handler,
            lambda behaviour: self._guard(behaviour, method),
            lambda behaviour: self._guard_stream(behaviour, method),
            _parser(handler.request_deserializer),
        )

    @staticmethod
    def _guard(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(_require_parsed(request), context)
            except Exception as error:
                _abort(error, method, context)

        return guarded

    def _guard_stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        def bounded(request: Any, context: grpc.ServicerContext) -> Any:
            if not self._streams.acquire(blocking=False):
                raise ServiceBusy(f"{MAX_STREAMS} streams are open already; close one first")
            try:
                yield from behaviour(_require_parsed(request), context)
            finally:
                self._streams.release()

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                yield from bounded(request, context)
            except Exception as error:
                _abort(error, method, context)

        return guarded


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a parser that returns a parse error instead of raising it: gRPC would report it as an internal error."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return parse


def _require_parsed(request: Any) -> Any:
    if isinstance(request, DecodeError):
        raise InvalidRequest(f"request: not the message that this method accepts ({request})")
    return request


def _abort(error: Exception, method: str, context: grpc.ServicerContext) -> None:
    status = rpc_status.to_status(status_of(error))
    if status.code is grpc.StatusCode.INTERNAL:
        log.error("call failed", method=method, code=status.code.name, exc_info=error)
    else:
        log.warning("call refused", method=method, code=status.code.name, error=status.details)
    context.abort_with_status(status)


class Server:
    """A listening gRPC server for the given roles. It responds to health and status calls until it is stopped."""

    def __init__(
        self,
        roles: Sequence[HostedRole],
        listen: str,
        credentials: Credentials = LOCAL,
        interceptors: Sequence[CallInterceptor] = (),
        metrics_address: str = "",
        health_listen: str | None = None,
        allowed: Mapping[str, frozenset[str]] = CALLERS,
        bind_seconds: float = 0.0,
        limits: CallLimits | None = None,
        devices: Callable[[], tuple[DeviceReading, ...]] = tuple,
        register: Callable[[grpc.Server], None] = lambda server: None,
    ) -> None:
        """Bind and start.

        ``metrics_address`` is part of the status. ``health_listen``: HOST:PORT of a separate listener for health checks.
        ``allowed``: the processes that may call each method. ``bind_seconds``: time to wait for a port that is in use.
        ``limits`` default to those of a service of one run. ``devices`` returns the readings of the process's devices at once.
        ``register`` adds further services of the process. Raises ConfigError if an address is taken or invalid, or is not
        loopback without certificates and without ``allow_plaintext``.
        """
        limits = limits or CallLimits()
        if not credentials.encrypted:
            check_listen_address(listen, credentials.allow_plaintext)
        self._roles = roles
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=limits.calls, thread_name_prefix="rpc"),
            interceptors=[*interceptors, AccessControl(credentials, allowed), ErrorInterceptor()],
            options=limits.options(),
            maximum_concurrent_rpcs=limits.calls,
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(
            StatusServicer(roles, metrics_address, devices), self._server
        )
        for role in roles:
            role.register(self._server)
        register(self._server)
        host = listen.rpartition(":")[0]
        deadline = time.monotonic() + bind_seconds
        while (port := credentials.listen(self._server, listen)) == 0 and time.monotonic() < deadline:
            time.sleep(BIND_INTERVAL)
        if port == 0:
            raise ConfigError(
                f"listen {listen}: the port is in use or the address is not this machine's; "
                "stop what listens there or choose another port"
            )
        self.address = f"{host}:{port}"
        self._server.start()
        for name in ("", *(role.role.service for role in roles)):
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
        """HOST:PORT of the separate listener for health checks; None without a listener."""
        return self._probes.address if self._probes is not None else None

    def drain(self, seconds: float) -> None:
        """Refuse new calls, and give running calls ``seconds`` to finish. End the streams that would never finish."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace=seconds)
        for role in self._roles:
            if isinstance(role, StreamingRole):
                role.end_streams()
        if not stopped.wait(NOTICE_SECONDS):
            self._health.cancel_watches()
            stopped.wait()

    def stop(self, drain: float) -> None:
        """Refuse new calls, give running calls ``drain`` seconds to finish, then close the roles. Call at most once."""
        self.drain(drain)
        if self._probes is not None:
            self._probes.stop()
        for role in self._roles:
            role.close()
