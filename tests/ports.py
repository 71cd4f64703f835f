"""Ports at which no process listens."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
