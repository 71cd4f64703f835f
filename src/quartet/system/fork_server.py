"""Fork server: a process that imports the libraries of a program once, and then forks into the program, which starts at once.

See docs/adr/0029-fork-server.md. Linux only.
"""

from __future__ import annotations

import quartet.system.sys_path  # noqa: F401 - first, so that files in the working directory cannot shadow libraries

# isort: split
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from quartet.system.child_processes import die_with, module_command, tied_to_parent
from quartet.system.compute_environment import set_cpu_environment

IMPORT_SECONDS = 120.0
"""Time limit for the server to import the libraries and to fork for the first time."""
FORK_SECONDS = 5.0
"""Time limit of a later fork."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_NUMBER = struct.Struct("!Q")


class ForkedProcess:
    """A child process that a fork server started, with the methods of ``subprocess.Popen`` that supervision needs.

    The process id stays valid until ``poll`` or ``wait`` has returned the exit status.
    """

    def __init__(self, pid: int) -> None:
        """``pid``: a child of this process."""
        self.pid = pid
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, so the kernel has dropped the status.
                ended, status = self.pid, 0
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the end of the process and return its exit status. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A fork server process and its client. Use it from the thread that created it."""

    def __init__(self, program: str, preloaded: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start the server. It imports the modules ``preloaded``; its forks run ``python -m PROGRAM``."""
        self._time_limit = IMPORT_SECONDS
        self._connection, other_end = socket.socketpair()
        numbers = str(other_end.fileno()), str(os.getpid())
        with other_end, log.open("ab") as output:
            self._process = subprocess.Popen(
                tied_to_parent(module_command("quartet.system.fork_server", *numbers, program, *preloaded)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(other_end.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def start(self, arguments: Sequence[str], output: int, inherited: int) -> ForkedProcess | None:
        """Start the program, with the number of the descriptor ``inherited`` as its last argument.

        ``output`` is the descriptor of its standard output and error. Waits until the server has imported its modules. The new
        process is a child of this process and dies with it. Returns None if the server is dead. A server that does not respond is
        stopped.
        """
        content = json.dumps(arguments).encode()
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as reply, _adopting_orphans():
            try:
                socket.send_fds(self._connection, [_NUMBER.pack(len(content))], [output, inherited, writer])
                self._connection.sendall(content)
            except OSError:
                return None
            finally:
                os.close(writer)
            if not wait([reader], self._time_limit):
                self.close()
                return None
            self._time_limit = FORK_SECONDS
            # Nothing if the server or the new process has died.
            pid = reply.read(_NUMBER.size)
            return ForkedProcess(_NUMBER.unpack(pid)[0]) if pid else None

    def close(self) -> None:
        """Stop the server. The processes that it started keep running. May be called again."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parents die."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _main(connection_number: str, client: str, program: str, *preloaded: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # If the client ignores it, this process inherits that.
    # One thread, because a fork copies only the thread that calls it. The program sets its own number of threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    set_cpu_environment(os.environ)
    os.environ["SPT_NOENV"] = "1"  # setproctitle then leaves the environment of the process readable.
    gc.disable()  # The imports create only objects that stay.
    for module in (*preloaded, "setproctitle"):
        with contextlib.suppress(Exception):  # The program imports it again and reports the error.
            importlib.import_module(module)
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("error: an imported module has started a thread, so this process cannot fork")
    with socket.socket(fileno=int(connection_number)) as connection:
        arguments = _wait_for_fork(connection, int(client))
    gc.enable()
    import setproctitle

    sys.argv = [program, *arguments]
    setproctitle.setproctitle(" ".join(sys.argv))
    runpy.run_module(program, run_name="__main__", alter_sys=False)


def _wait_for_fork(connection: socket.socket, client: int) -> list[str]:
    """Fork at every request until the client closes the connection. Returns the arguments of the program, only in a fork."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
        if not header:
            sys.exit(0)
        arguments = json.loads(connection.recv(_NUMBER.unpack(header)[0], socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            # The client adopts the second fork, because the first ends.
            first = os.getpid()
            if os.fork():
                os._exit(0)
            output, inherited, reply = descriptors
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            _wait_for_adoption(first, client)
            os.write(reply, _NUMBER.pack(os.getpid()))
            os.close(output)
            os.close(reply)
            return [*arguments, str(inherited)]
        os.waitpid(child, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_adoption(first: int, client: int) -> None:
    while (parent := os.getppid()) != client:
        if parent != first:  # The client has died, or has stopped waiting.
            os._exit(1)
        time.sleep(0.001)
    die_with(client)


if __name__ == "__main__":
    _main(*sys.argv[1:])
