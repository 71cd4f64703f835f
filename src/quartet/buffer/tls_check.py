"""Check whether a server uses TLS as its URL says. If it does not, a connection only times out or closes without a reason."""

from __future__ import annotations

import socket
import ssl

from quartet.config.url_redaction import redact_url
from quartet.errors import ConfigError

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
