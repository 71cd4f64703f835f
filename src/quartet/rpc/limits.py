"""Limits and options that every server and channel shares."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest message in either direction."""

MAX_CONCURRENT_CALLS = 64
"""Calls that a server works on at once; further ones answer RESOURCE_EXHAUSTED."""

WORKERS = MAX_CONCURRENT_CALLS
"""Threads that answer calls. Model work has one thread of its own, so these mostly wait: all that may wait at once is less."""

MAX_STREAMS = 16
"""Streams that a server keeps open at once, each of which holds a worker."""

MAX_PENDING_WORK = 16
"""Calls that may wait for a compute thread; fewer than WORKERS, so that health and status always find a free one."""

MAX_CALL = 24 * 3600.0
"""Seconds that a call waits for model work at most, whatever deadline its caller set, or none."""

MAX_PENDING_SAVES = 4
"""Saves that one role may have in hand, the one that is written included; with the work that waits still fewer than WORKERS."""

_MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

SERVER_OPTIONS = (
    *_MESSAGE_OPTIONS,
    # Without this a second server binds the same port silently and takes half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Of one connection.
    ("grpc.max_concurrent_streams", 128),
    # Then a caller connects anew, and looks its name up anew: replicas that have come since get their share. Calls in hand go on.
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_metadata_size", 16 * 1024),
    # Whoever connects has this long to show who they are.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

CHANNEL_OPTIONS = (
    *_MESSAGE_OPTIONS,
    # A name may stand for several replicas of a scorer: calls go to each in turn.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each channel: one that failed waits for longer and longer, and a new one is not to wait with it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Pings go on while a long call sends nothing, or a frozen peer would only be missed at the deadline.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
