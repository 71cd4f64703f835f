"""Health checks: a plaintext listener for probes without a certificate, and a command that checks it.

``python -m quartet.rpc.health HOST:PORT`` exits with status 0 if the process there reports itself as serving, else with 1 and the
reason on standard error.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quartet.errors import ConfigError
from quartet.rpc.limits import CallLimits

TIMEOUT = 5.0
"""Seconds for one check."""
_WORKERS = 16
_OPTIONS = {
    **dict(CallLimits().options()),
    "grpc.max_receive_message_length": 4096,
    # An unfinished request occupies a worker until the connection reaches its maximum age.
    "grpc.max_connection_age_ms": 15_000,
    "grpc.max_connection_age_grace_ms": 2_000,
}


class HealthServicer(health.HealthServicer):
    """Health checks whose watches can be cancelled. A watch lasts as long as its caller does."""

    def __init__(self) -> None:
        super().__init__()
        self._watches = set[grpc.ServicerContext]()
        self._watches_lock = threading.Lock()

    def Watch(self, request: Any, context: grpc.ServicerContext, send_response_callback: Any = None) -> Any:
        """Stream the status of a service at every change."""
        with self._watches_lock:
            self._watches.add(context)
        if not context.add_callback(lambda: self._forget(context)):
            self._forget(context)
        return super().Watch(request, context, send_response_callback)

    def cancel_watches(self) -> None:
        """Cancel all watches."""
        with self._watches_lock:
            watches = list(self._watches)
        # Without the lock: the end of a watch takes it.
        for context in watches:
            context.cancel()  # type: ignore[no-untyped-call]

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._watches_lock:
            self._watches.discard(context)


class HealthListener:
    """Server for gRPC health checks, and for nothing else, at a separate address."""

    def __init__(self, servicer: health.HealthServicer, listen: str) -> None:
        """Listen at HOST:PORT. Raises ConfigError if the port is in use or the address is not local."""
        # Watch is left out: each watcher would hold a thread, and callers are not authenticated.
        checks = health_pb2_grpc.HealthServicer()
        checks.Check = servicer.Check
        self._server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="health"),
            options=tuple(_OPTIONS.items()),
            maximum_concurrent_rpcs=_WORKERS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        # Imported here: the command below runs every few seconds and does not need the config.
        from quartet.rpc.security.credentials import LOCAL

        port = LOCAL.listen(self._server, listen)
        if port == 0:
            raise ConfigError(
                f"health {listen}: the port is in use or the address is not this machine's; choose another"
            )
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        self._server.start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.stop(grace=None).wait()


def problem(address: str) -> str:
    """Return why the process with the health listener at HOST:PORT does not serve; "" if it does."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            return f"no response: {error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return f"reports {name}: it loads its model or ends; see its log"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].rpartition(":")[2].isdecimal():
        print("error: expected one argument: the HOST:PORT of a health listener", file=sys.stderr)
        sys.exit(2)
    if reason := problem(sys.argv[1]):
        print(f"error: health {sys.argv[1]}: {reason}", file=sys.stderr)
        sys.exit(1)
