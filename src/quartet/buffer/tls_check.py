"""Whether a server speaks TLS as its address says. Where it does not, each side waits for the other, or just hangs up."""

from __future__ import annotations

import socket
import ssl

from quartet.config import redact_url
from quartet.errors import ConfigError

PATIENCE = 2.0
"""Seconds that a server has for each answer."""


def check_encryption(url: str, host: str, port: int) -> None:
    """Raises ConfigError where a server of ``rediss://`` answers in plaintext, or one of ``redis://`` speaks TLS."""
    where = f"rollout buffer at {redact_url(url)}"
    if url.startswith("rediss://") and _answers_in_plaintext(host, port):
        raise ConfigError(f"{where}: does not speak TLS; give redis:// in buffer.url, or a Redis with a tls-port")
    if url.startswith("redis://") and _shakes_hands(host, port):
        raise ConfigError(
            f"{where}: speaks TLS; give rediss:// in buffer.url, and security.certificates where it asks for a certificate"
        )


def _answers_in_plaintext(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), PATIENCE) as connection:
            connection.sendall(b"PING\r\n")
            # +PONG, or an error: that a password is missing, for one.
            return connection.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _shakes_hands(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # Nothing is told to it.
    try:
        with socket.create_connection((host, port), PATIENCE) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # It refuses in TLS's own words.
    except OSError:
        return False
