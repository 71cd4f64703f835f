"""Connecting to Redis, and what its failures mean."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quartet.buffer.tls_check import check_encryption
from quartet.config import is_redacted, redact_url
from quartet.errors import BufferFailed, ConfigError, QuartetError, ServiceUnavailable

Redis = redis.Redis
CONNECT_TIMEOUT = 5.0
"""Seconds to wait for a connection."""
FIRST_PATIENCE = 2.0
"""The same of the first attempt, after which it is asked whether the server speaks TLS as the url says."""
POLL = 0.1
"""Seconds between looks at a server that is to come back."""
COMMAND_TIMEOUT = 10.0
"""Seconds to wait for an answer. One more attempt follows; then the server counts as lost."""


def connect(url: str, patience: float = COMMAND_TIMEOUT) -> Redis:
    """A client whose server answered a ping; ``patience``: seconds that it waits for an answer.

    Raises ConfigError for a malformed url, ServiceUnavailable without a server.
    """
    if is_redacted(url):
        raise ConfigError(
            f"buffer.url {url}: the stars stand for a password, which is kept nowhere; "
            "give the whole url with --set buffer.url=URL"
        )
    try:
        client = _client(url, patience, attempts=2)
    except ValueError:
        # Its text may quote a part of the password.
        raise ConfigError(
            f"buffer.url {redact_url(url)}: malformed; expected redis://HOST:PORT/DB, rediss://… or unix:///PATH, "
            "special characters of a password escaped as %XX"
        ) from None
    with translate_errors(url):
        _ping(client, url, patience)
    return client


def _client(url: str, patience: float, attempts: int) -> Redis:
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=min(CONNECT_TIMEOUT, patience),
        socket_timeout=patience,
        retry=Retry(NoBackoff(), attempts - 1),
    )


def _ping(client: Redis, url: str, patience: float) -> None:
    """Raises ConfigError where one side speaks TLS and the other does not, which no waiting mends, and what redis-py raises."""
    if not urlsplit(url).scheme.startswith("redis"):
        client.ping()
        return
    try:
        with closing(_client(url, min(FIRST_PATIENCE, patience), attempts=1)) as first:
            first.ping()
    except redis.exceptions.AuthenticationError:
        raise
    except redis.exceptions.RedisError:
        place = client.connection_pool.connection_kwargs
        check_encryption(url, place.get("host", "localhost"), int(place.get("port", 6379)))
        client.ping()


def wait_for_server(client: Redis, url: str, timeout: float) -> None:
    """Returns when the server answers. Raises ServiceUnavailable after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with translate_errors(url):
                client.ping()
            return
        except (ServiceUnavailable, BufferFailed):
            # A server that reads its append-only file answers every command with an error.
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL)


class ConnectionMonitor:
    """Whether a process reaches its server, as far as it has tried: who asks never waits for the network."""

    def __init__(self, client: Redis, url: str) -> None:
        self._client, self._url = client, url
        self._lock = threading.Lock()
        self._lost = False

    def is_lost(self) -> bool:
        """Whether the last command did not reach the server, and nothing has since."""
        return self._lost

    def mark_lost(self) -> None:
        """Notes that a command did not reach the server, which is asked from now on, on a thread of its own, until it answers."""
        with self._lock:
            if self._lost:
                return
            self._lost = True
        threading.Thread(target=self._find, name="link to the buffer", daemon=True).start()

    def _find(self) -> None:
        try:
            wait_for_server(self._client, self._url, math.inf)
        except QuartetError:
            pass  # It answers, with a refusal that the next command shows to whoever can mend it.
        finally:
            self._lost = False


@contextmanager
def translate_errors(url: str, lost: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns redis-py's exceptions into domain exceptions that name the buffer. Calls ``lost`` where it could not be reached."""
    where = f"rollout buffer at {redact_url(url)}"
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"{where}: refused the credentials ({error}); correct buffer.url, or buffer.password_file"
        ) from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        lost()
        raise ServiceUnavailable(
            f"{where}: unreachable ({error}); start Redis there, correct buffer.url, or set it null for an embedded one"
        ) from None
    except redis.exceptions.OutOfMemoryError:
        raise BufferFailed(
            f"{where}: is full; raise its maxmemory, or lower rollout.prompts_per_step or checkpoint.every_steps: experience stays "
            "there until a checkpoint covers it"
        ) from None
    except redis.exceptions.RedisError as error:
        raise BufferFailed(f"{where}: {error}") from None
