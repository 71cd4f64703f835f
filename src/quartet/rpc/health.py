"""Health beside the calls: a listener that answers health checks and nothing else, in plaintext, and the check itself.

Probes of a container runtime have no certificate. What they learn is whether the process serves. ``python -m quartet.rpc.health
HOST:PORT`` asks; exit status 0: it serves.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quartet.errors import ConfigError
from quartet.rpc.limits import SERVER_OPTIONS

PATIENCE = 5.0
"""Seconds that a check waits for its answer."""
_WORKERS = 16
_OPTIONS = {
    **dict(SERVER_OPTIONS),
    "grpc.max_receive_message_length": 4096,
    # Who asks and does not finish asking holds a worker until then.
    "grpc.max_connection_age_ms": 15_000,
    "grpc.max_connection_age_grace_ms": 2_000,
}


class HealthListener:
    """Answers gRPC health checks at an address of its own."""

    def __init__(self, servicer: health.HealthServicer, listen: str) -> None:
        """Raises ConfigError when the address is taken or not this machine's."""
        # Watch is left out: each watcher would hold a thread, and anyone may come.
        checks = health_pb2_grpc.HealthServicer()
        checks.Check = servicer.Check
        self._server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="health"),
            options=tuple(_OPTIONS.items()),
            maximum_concurrent_rpcs=_WORKERS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        # Not above: a check runs every few seconds, and needs none of what this brings along.
        from quartet.rpc.security.credentials import LOCAL

        port = LOCAL.listen(self._server, listen)
        if port == 0:
            raise ConfigError(
                f"health {listen}: the port is taken or the address is not this machine's; choose another"
            )
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        self._server.start()

    def stop(self) -> None:
        """Stops listening."""
        self._server.stop(grace=None).wait()


def serves(address: str) -> bool:
    """Whether the process whose health is told at HOST:PORT says that it serves."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].rpartition(":")[2].isdecimal():
        print("error: expected one address, HOST:PORT, to ask for its health", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if serves(sys.argv[1]) else 1)
