"""Check of an address at which a process listens."""

from __future__ import annotations

import socket

from quartet.errors import ConfigError


def check_port(key: str, listen: str) -> None:
    """Check that a process can listen at HOST:PORT. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does, so that a port with lingering connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(
                f"{key} {listen}: cannot listen there ({error.strerror}); "
                "stop the process that uses the port, choose another port, or null for a free one"
            ) from None
