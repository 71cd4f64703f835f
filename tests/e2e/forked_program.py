"""Programs in forks of a process that has imported Quartet's libraries once, so that a start costs no seconds of imports.

A fork behaves as a new process that runs ``quartet`` or ``python``: it has the arguments, environment, working directory and
outputs of a ``Command``. Its own fork server, from which a run starts its services, is a fork as well.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from quartet.launcher import launcher
from quartet.system import fork_server
from quartet.system.child_processes import die_with
from quartet.system.fork_server import ForkedProcess, ForkServer

ROOT = str(Path(__file__).parents[2])
MARK = "QUARTET_TESTS_MARK"
"""Variable whose place in the environment that /proc shows holds the scratch folder of the command: forks keep their parent's."""
PRELOADED = (*launcher.PRELOADED, "quartet.cli.start_run", "quartet.api.training")


@functools.cache
def _server() -> ForkServer:
    # As the command sets it before it imports gRPC.
    environment = {**os.environ, "GRPC_VERBOSITY": "ERROR", MARK: " " * 100, "PYTHONPATH": ROOT}
    with tempfile.NamedTemporaryFile() as log:
        return ForkServer("tests.e2e.forked_program", PRELOADED, environment, Path(log.name))


def start(
    arguments: list[str], cwd: Path, environment: dict[str, str], scratch: Path, out: int, err: int
) -> ForkedProcess:
    """Start ``quartet ARGUMENTS``, ``python -m MODULE ARGUMENTS`` or ``python SCRIPT ARGUMENTS``."""
    (scratch / "request").write_text(json.dumps([arguments, str(cwd.absolute()), environment]))
    process = _server().start([str(scratch)], out, err)
    assert process is not None, "the process that imports the libraries has died"
    return process


class _StandbyForkServer(ForkServer):
    """The fork server of a run in a fork that this process has made before it started the program."""

    def __init__(self, program: str, preloaded: Any, environment: dict[str, str], log: Path) -> None:
        self._time_limit = fork_server.IMPORT_SECONDS
        self._connection, self._process = _standby.pop()  # type: ignore[assignment]
        request = json.dumps([program, list(preloaded), environment, str(log.absolute())]).encode()
        self._connection.sendall(len(request).to_bytes(8) + request)


_standby: list[tuple[socket.socket, ForkedProcess]] = []


def _serve(connection: socket.socket, client: int) -> None:
    """Wait until the program starts its fork server, and be that."""
    die_with(client)
    size = connection.recv(8, socket.MSG_WAITALL)
    if not size:
        return
    program, preloaded, environment, log = json.loads(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
    os.setsid()
    _replace_environment(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    fork_server._main(str(connection.detach()), str(client), program, *preloaded)


def _end_standby() -> None:
    for _, process in _standby:
        process.kill()
        process.wait()


def _replace_environment(environment: dict[str, str]) -> None:
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)


def _main(scratch: str, err: str) -> None:
    sys.path.remove(ROOT)
    os.dup2(int(err), 2)
    os.close(int(err))
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), scratch.encode(), len(scratch))
    arguments, cwd, environment = json.loads(Path(scratch, "request").read_text())
    _replace_environment(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, other = socket.socketpair()
    parent = os.getpid()
    if (standby := os.fork()) == 0:
        ours.close()
        _serve(other, parent)
        return
    other.close()
    _standby.append((ours, ForkedProcess(standby)))
    atexit.register(_end_standby)
    launcher.ForkServer = _StandbyForkServer  # type: ignore[misc]
    if arguments[0] != sys.executable:
        from quartet.cli.main import main

        sys.argv = arguments
        main()
    elif arguments[1] == "-m":
        sys.argv = arguments[2:]
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path(arguments[1]).absolute().parent))
        runpy.run_path(arguments[1], run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
