"""Workers of ``make test`` that are forks of one process, which has imported the libraries once."""

from __future__ import annotations

import socket
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from quartet.system.fork_server import ForkServer
from tests.e2e.forked_program import start_server, start_worker


def fork_workers() -> None:
    """Make execnet fork the workers instead of starting new processes."""
    _ForkedWorker.server = start_server()
    gateway_io.Popen2IOMaster = _ForkedWorker  # type: ignore[assignment, misc]


class _ForkedWorker(Popen2IO):
    """A worker, and the connection to its standard input and output: what execnet has for a new process."""

    server: ForkServer

    def __init__(self, args: list[str], execmodel: Any) -> None:
        self._socket, other_end = socket.socketpair()
        with other_end:
            self.popen = start_worker(self.server, other_end, self._socket)
        super().__init__(self._socket.makefile("wb"), self._socket.makefile("rb"), execmodel=execmodel)

    def close_write(self) -> None:
        super().close_write()
        self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> int:
        return self.popen.wait()

    def kill(self) -> None:
        self.popen.kill()
