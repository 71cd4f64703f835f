"""Connect to Redis, and translate its errors."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from quartet.config.url_redaction import is_redacted, redact_url
from quartet.errors import BufferFailed, ConfigError, QuartetError, ServiceUnavailable

log = structlog.get_logger()

Redis = redis.Redis
CONNECT_TIMEOUT = 5.0
"""Seconds to wait for a connection."""
FIRST_PING_TIMEOUT = 2.0
"""Seconds to wait for the first ping. If it fails, the client checks whether the server uses TLS as the URL says."""
POLL_SECONDS = 0.1
"""Seconds between pings of a server that is down."""
COMMAND_TIMEOUT = 10.0
"""Seconds to wait for the response to a command. After a second attempt the server counts as unreachable."""
START_WAIT_SECONDS = 60.0
"""Seconds that a service waits at its start for a server that is down. A crashed one may be restarted in that time."""
EMBEDDED_SOCKET = "embedded-redis.sock"
"""Name of the socket of an embedded server."""


def connect_at_start(url: str, load_seconds: float) -> Redis:
    """Return a client, and wait for a server that is down or loads its data. For the start of a service.

    Waits for ``START_WAIT_SECONDS``, or ``load_seconds`` if that is shorter. For errors see ``connect``.
    """
    deadline = time.monotonic() + min(START_WAIT_SECONDS, load_seconds)
    waiting = False
    while True:
        try:
            return connect(url)
        except (ServiceUnavailable, BufferFailed) as error:
            if time.monotonic() > deadline:
                raise
            if not waiting:
                log.warning("waiting for the rollout buffer", error=str(error))
            waiting = True
        time.sleep(POLL_SECONDS)


def connect(url: str, timeout: float = COMMAND_TIMEOUT) -> Redis:
    """Return a client after a successful ping. ``timeout`` is the time to wait for each response, in seconds.

    Raises ConfigError for a malformed URL, ServiceUnavailable if the server cannot be reached.
    """
    if is_redacted(url):
        raise ConfigError(
            f"buffer.url {url}: the stars replace a password, which no file contains; "
            "give the complete URL with --set buffer.url=URL, or in the environment variable QUARTET_BUFFER_URL"
        )
    try:
        client = _client(url, timeout, attempts=2)
    except ValueError:
        # The message may quote a part of the password.
        raise ConfigError(
            f"buffer.url {redact_url(url)}: malformed; expected redis://HOST:PORT/DB, rediss://… or unix:///PATH, "
            "special characters of a password escaped as %XX"
        ) from None
    with translate_errors(url):
        _ping(client, url, timeout)
    return client


def _client(url: str, timeout: float, attempts: int) -> Redis:
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=min(CONNECT_TIMEOUT, timeout),
        socket_timeout=timeout,
        retry=Retry(NoBackoff(), attempts - 1),
    )


def dedicated_client(url: str) -> Redis:
    """Return a client for one thread, which does not repeat a command after a lost connection."""
    return _client(url, COMMAND_TIMEOUT, attempts=1)


def _ping(client: Redis, url: str, timeout: float) -> None:
    """Ping the server. Raises ConfigError if only one side uses TLS, and redis-py's errors otherwise."""
    if not urlsplit(url).scheme.startswith("redis"):
        client.ping()
        return
    try:
        with closing(_client(url, min(FIRST_PING_TIMEOUT, timeout), attempts=1)) as first:
            first.ping()
    except redis.exceptions.AuthenticationError:
        raise
    except redis.exceptions.RedisError:
        options = client.connection_pool.connection_kwargs
        check_encryption(url, options.get("host", "localhost"), int(options.get("port", 6379)))
        client.ping()


def wait_for_server(client: Redis, url: str, timeout: float) -> None:
    """Wait until the server responds. Raises ServiceUnavailable after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with translate_errors(url):
                client.ping()
            return
        except (ServiceUnavailable, BufferFailed):
            # While a server loads its append-only file, it responds to every command with an error.
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


class ConnectionMonitor:
    """True if a process can reach its server, by its last command. Reading the state never waits for the network."""

    def __init__(self, client: Redis, url: str) -> None:
        self._client, self._url = client, url
        self._lock = threading.Lock()
        self._lost = False

    def is_lost(self) -> bool:
        """Return whether the last command failed to reach the server, and no ping has succeeded since."""
        return self._lost

    def mark_lost(self) -> None:
        """Record that a command did not reach the server. A separate thread pings the server until it responds."""
        with self._lock:
            if self._lost:
                return
            self._lost = True
        threading.Thread(target=self._wait_until_reachable, name="buffer connection", daemon=True).start()

    def _wait_until_reachable(self) -> None:
        try:
            wait_for_server(self._client, self._url, math.inf)
        except QuartetError:
            pass  # The server responds with an error, which the next command reports.
        finally:
            self._lost = False


def _remedy(url: str) -> str:
    if urlsplit(url).path.endswith(f"/{EMBEDDED_SOCKET}"):
        return "the embedded server has ended; see redis.log of the run's logs"
    return "start Redis there, correct buffer.url, or set it to null for an embedded server"


@contextmanager
def translate_errors(url: str, lost: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Translate redis-py's exceptions to domain exceptions that name the buffer. Call ``lost`` if it cannot be reached."""
    where = f"rollout buffer at {redact_url(url)}"
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"{where}: rejected the credentials ({error}); correct buffer.url or buffer.password_file"
        ) from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        lost()
        unreachable = ServiceUnavailable(f"{where}: unreachable ({error}); {_remedy(url)}")
        unreachable.service = "redis"
        raise unreachable from None
    except redis.exceptions.OutOfMemoryError:
        raise BufferFailed(
            f"{where}: is full; raise its maxmemory, or lower rollout.prompts_per_step or checkpoint.every_steps: experience "
            "stays in Redis until a checkpoint covers it, and the turns of episodes until their step is committed"
        ) from None
    except redis.exceptions.RedisError as error:
        raise BufferFailed(f"{where}: {error}") from None


TIMEOUT = 2.0
"""Seconds to wait for each response."""


def check_encryption(url: str, host: str, port: int) -> None:
    """Raise ConfigError if the server of a ``rediss://`` URL uses plaintext, or that of a ``redis://`` URL uses TLS."""
    where = f"rollout buffer at {redact_url(url)}"
    if url.startswith("rediss://") and _responds_in_plaintext(host, port):
        raise ConfigError(f"{where}: does not use TLS; use redis:// in buffer.url, or a Redis with a tls-port")
    if url.startswith("redis://") and _completes_handshake(host, port):
        raise ConfigError(
            f"{where}: uses TLS; use rediss:// in buffer.url, and security.certificates if it requires a client certificate"
        )


def _responds_in_plaintext(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), TIMEOUT) as connection:
            connection.sendall(b"PING\r\n")
            # +PONG, or an error, for example about a missing password.
            return connection.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _completes_handshake(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # Nothing confidential is sent.
    try:
        with socket.create_connection((host, port), TIMEOUT) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # A TLS alert: the server refuses the handshake.
    except OSError:
        return False
