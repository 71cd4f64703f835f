"""Limits and gRPC options that all servers and channels share."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Maximum message size in both directions."""

MAX_CONCURRENT_CALLS = 64
"""Maximum calls that a server handles at once. Further calls fail with RESOURCE_EXHAUSTED.

Each has a thread, and most threads wait for the compute thread. Together, the limits below stay under this number."""

MAX_STREAMS = 16
"""Maximum open streams of a server. Each one holds a thread."""

MAX_WEIGHT_STREAMS = 8
"""Maximum open streams of weights of a process. Fewer than MAX_STREAMS, so that other streams find a free place."""

MAX_PENDING_WORK = 16
"""Maximum calls that wait for a compute thread. So few that health and status always find a free thread."""

MAX_CALL_SECONDS = 24 * 3600.0
"""Maximum time that a call waits for model work, also for a caller with a later deadline or none."""

MAX_PENDING_SAVES = 4
"""Maximum pending saves of one role, including the running one."""

SPARE_CALLS = 4
"""Calls of one connection beyond the quota of a shared service that reach it, so that it can refuse them."""

_MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_SERVER_OPTIONS = (
    *_MESSAGE_OPTIONS,
    # With port reuse, a second server could bind the same port silently and would receive half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise a server that has just reached the limit of streams of a connection resets some that the client may still start.
    ("grpc.http.overload_protection", 0),
    # A caller reconnects after this time and resolves the name again, so that new replicas get their share. Running calls finish.
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_metadata_size", 16 * 1024),
    # Time limit for the TLS handshake of a new connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

CHANNEL_OPTIONS = (
    *_MESSAGE_OPTIONS,
    # A name may resolve to several replicas of a scoring service: calls go to each in turn.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.enable_http_proxy", 0),
    # A separate connection per channel: the backoff of a failed connection must not delay a new channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Ping during a long call that sends nothing. Otherwise a frozen service is noticed only at the deadline.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of the calls of a server."""

    calls: int = MAX_CONCURRENT_CALLS
    """Calls that are handled at once, each in its own thread. Further calls fail with RESOURCE_EXHAUSTED."""
    calls_per_connection: int = 128
    """Calls of one connection that reach the server. Further calls wait at the client."""

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the options of the gRPC server."""
        return (*_SERVER_OPTIONS, ("grpc.max_concurrent_streams", self.calls_per_connection))


def agent_limits(max_concurrent: int) -> CallLimits:
    """Return the limits of a service that runs this many agents at once. Each call lasts as long as its agent.

    Further calls reach the service, which refuses them at once, so that the agents of all callers have the same chance.
    """
    calls = max_concurrent + MAX_CONCURRENT_CALLS
    return CallLimits(calls, calls)


def shared_limits(max_runs: int, calls_per_run: int) -> CallLimits:
    """Return the limits of a service that ``max_runs`` runs share, each with a quota of ``calls_per_run`` pending calls.

    A connection that sends more calls than its quota leaves threads for the other runs, and for health and status.
    """
    per_connection = calls_per_run + SPARE_CALLS
    return CallLimits(max_runs * per_connection + MAX_STREAMS, per_connection)
