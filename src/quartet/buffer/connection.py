"""Connecting to Redis, and what its failures mean."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quartet.config import redact_url
from quartet.errors import BufferFailed, ConfigError, ServiceUnavailable

Redis = redis.Redis
CONNECT_TIMEOUT = 5.0
"""Seconds to wait for a connection."""
POLL = 0.1
"""Seconds between looks at a server that is to come back."""
COMMAND_TIMEOUT = 10.0
"""Seconds to wait for an answer. One more attempt follows; then the server counts as lost."""


def connect(url: str) -> Redis:
    """A client whose server answered a ping. Raises ConfigError for a malformed url, ServiceUnavailable without a server."""
    try:
        client: Redis = redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_TIMEOUT, socket_timeout=COMMAND_TIMEOUT, retry=Retry(NoBackoff(), 1)
        )
    except ValueError:
        # Its text may quote a part of the password.
        raise ConfigError(
            f"buffer.url {redact_url(url)}: malformed; expected redis://HOST:PORT/DB, rediss://… or unix:///PATH, "
            "special characters of a password escaped as %XX"
        ) from None
    with translated(url):
        client.ping()
    return client


def wait_for_server(client: Redis, url: str, timeout: float) -> None:
    """Returns when the server answers. Raises ServiceUnavailable after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with translated(url):
                client.ping()
            return
        except (ServiceUnavailable, BufferFailed):
            # A server that reads its append-only file answers every command with an error.
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns redis-py's exceptions into domain exceptions that name the buffer."""
    where = f"rollout buffer at {redact_url(url)}"
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise ConfigError(f"{where}: refused the credentials ({error}); correct buffer.url") from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise ServiceUnavailable(
            f"{where}: unreachable ({error}); start Redis there, correct buffer.url, or set it null for an embedded one"
        ) from None
    except redis.exceptions.RedisError as error:
        raise BufferFailed(f"{where}: {error}") from None
