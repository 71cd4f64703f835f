"""Programs in forks of a process that has imported Quartet's libraries once, so that a start costs no seconds of imports.

A fork behaves as a new process that runs ``quartet`` or ``python``: it has the arguments, environment, working directory and
outputs of a ``Command``. Its own fork server, from which a run starts its services, is a fork as well, and so are its gateway
and the processes that check its input.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import setproctitle

from quartet.launcher import launcher
from quartet.system import fork_server
from quartet.system.child_processes import die_with, module_command, tied_to_parent
from quartet.system.fork_server import ForkedProcess, ForkServer

ROOT = str(Path(__file__).parents[2])
MARK = "QUARTET_TESTS_MARK"
"""Variable whose place in the environment that /proc shows holds the scratch folder of the command: forks keep their parent's."""
PRELOADED = (
    *launcher.PRELOADED,
    "quartet.cli.start_run",
    "quartet.api.training",
    "quartet.gateway.app",
    "uvicorn",
    "tests.e2e.preloaded",
)
MODULES = (
    "quartet.cli.main",
    "quartet.gateway",
    "quartet.preflight.checkpoint_worker",
    "quartet.preflight.prompt_worker",
    "quartet.services",
)
"""Modules that a program in a fork starts in forks."""
STACKS = signal.SIGUSR2
"""Signal that writes the stacks of all threads of a program to its standard error."""
SERVER = "QUARTET_TESTS_FORK_SERVER"
"""Variable with the process of the tests, its fork server and the descriptor of the connection, if it is a fork itself."""

SET_BY_IMPORTS = ("COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that imports of libraries set, so that a worker has them."""


def start_server() -> ForkServer:
    """Start a process that imports the libraries and then forks."""
    # As the command sets it before it imports gRPC.
    environment = {**os.environ, "GRPC_VERBOSITY": "ERROR", MARK: " " * 100, "PYTHONPATH": ROOT}
    with tempfile.NamedTemporaryFile() as log:
        return ForkServer("tests.e2e.forked_program", PRELOADED, environment, Path(log.name))


@functools.cache
def _server() -> ForkServer:
    process, server, connection = map(int, os.environ.get(SERVER, "0 0 0").split())
    return _GivenForkServer(server, connection) if process == os.getpid() else start_server()


class _GivenForkServer(ForkServer):
    """The fork server that a worker of the tests got with its start."""

    def __init__(self, process: int, connection: int) -> None:
        self._time_limit = fork_server.IMPORT_SECONDS
        self._connection, self._process = socket.socket(fileno=connection), ForkedProcess(process)  # type: ignore[assignment]


def start_worker(server: ForkServer, connection: socket.socket, other_end: socket.socket) -> ForkedProcess:
    """Start a worker of the tests as a fork of ``server``. ``connection``: its standard input and output, from ``other_end``."""
    with tempfile.TemporaryDirectory() as folder:
        request = _Request([], os.getcwd(), dict(os.environ), folder, works=True)
        process = server.start([request.write(Path(folder))], 2, connection.fileno())
        assert process is not None, "the process that imports the libraries has died"
        other_end.recv(1)  # It has read its request.
    return process


def start(
    arguments: list[str],
    cwd: Path,
    environment: dict[str, str],
    scratch: Path,
    out: int,
    err: int,
    terminal: bool = False,
    pipe: int | None = None,
) -> ForkedProcess:
    """Start ``quartet ARGUMENTS``, ``python -m MODULE ARGUMENTS`` or ``python SCRIPT ARGUMENTS``.

    ``terminal``: ``out`` is a terminal, which the program gets as its own. ``pipe``: descriptor whose number is the last argument
    of a service; ``out`` is then its standard error, too.
    """
    request = _Request(
        arguments, str(cwd.absolute()), environment, str(scratch), terminal=terminal, has_pipe=pipe is not None
    )
    process = _server().start([request.write(scratch)], out, err if pipe is None else pipe)
    assert process is not None, "the process that imports the libraries has died"
    return process


@dataclass
class _Request:
    """What a fork is to run. ``has_pipe``: its last argument is a descriptor; its other descriptor is its standard error.

    ``nested``: a program in a fork starts it. ``serves``: it is a fork server for the process with the first argument as its id.
    ``works``: it is a worker of the tests.
    """

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    scratch: str
    terminal: bool = False
    has_pipe: bool = False
    nested: bool = False
    serves: bool = False
    works: bool = False

    def write(self, folder: Path) -> str:
        """Write the request to a file. Return its path."""
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix="request-", delete=False) as file:
            json.dump(asdict(self), file)
        return file.name


class _StandbyForkServer(ForkServer):
    """A fork server of a program in a fork that this process has made before it started the program."""

    def __init__(self, program: str, preloaded: Any, environment: dict[str, str], log: Path) -> None:
        self._time_limit = fork_server.IMPORT_SECONDS
        self._connection, self._process = _standby.pop()  # type: ignore[assignment]
        request = json.dumps([program, list(preloaded), environment, str(log.absolute())]).encode()
        self._connection.sendall(len(request).to_bytes(8) + request)

    def start(self, arguments: Sequence[str], output: int, inherited: int) -> ForkedProcess | None:
        """See ForkServer. A process adopts orphans of one server at a time."""
        with _starting:
            return super().start(arguments, output, inherited)


_standby: list[tuple[socket.socket, ForkedProcess]] = []
_starting = threading.Lock()
_processes: list[ForkedProcess] = []


def _make_standby() -> bool:
    """Fork a process for a later fork server. Return whether this is its process, and it has ended."""
    ours, other = socket.socketpair()
    parent = os.getpid()
    if (standby := os.fork()) == 0:
        ours.close()
        os.setsid()  # Ctrl-C in the terminal reaches only the program.
        _serve(other, parent)
        return True
    other.close()
    _processes.append(ForkedProcess(standby))
    _standby.append((ours, _processes[-1]))
    return False


def _serve(connection: socket.socket, client: int) -> None:
    """Wait until the program starts its fork server, and be that."""
    die_with(client)
    size = connection.recv(8, socket.MSG_WAITALL)
    if not size:
        return
    program, preloaded, environment, log = json.loads(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
    _replace_environment(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    fork_server._main(str(connection.detach()), str(client), program, *preloaded)


class _Popen(subprocess.Popen[Any]):
    """Start ``python -m MODULE`` that is tied to this process in a fork, and other programs as usual."""

    scratch: str
    server: ForkServer | None = None

    def __new__(cls, command: Any, **options: Any) -> Any:
        """Return a ``ForkedProcess`` for a module of Quartet in the Python of this process."""
        tied = tied_to_parent(())
        if [*command[: len(tied) + 3]] != [*tied, *module_command()] or command[len(tied) + 3] not in MODULES:
            return super().__new__(cls)
        environment = dict(options["env"])
        if environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):  # The packages of another environment.
            return super().__new__(cls)
        with ExitStack() as stack:
            output = options["stdout"]
            if output == subprocess.DEVNULL:
                output = stack.enter_context(open(os.devnull, "wb"))
            has_pipe = bool(options.get("pass_fds"))
            arguments = [sys.executable, *command[len(tied) + 2 : -1 if has_pipe else None]]
            request = _Request(arguments, os.getcwd(), environment, cls.scratch, has_pipe=has_pipe, nested=True)
            inherited = options["pass_fds"][0] if has_pipe else output.fileno()
            if _Popen.server is None:
                _Popen.server = _StandbyForkServer(
                    "tests.e2e.forked_program", (), dict(os.environ), Path(cls.scratch, "forks.log")
                )
            process = _Popen.server.start([request.write(Path(cls.scratch))], output.fileno(), inherited)
        assert process is not None, "the process that forks has died"
        return process


def _end_standby() -> None:
    for process in _processes:
        process.kill()
        process.wait()


def _replace_environment(environment: dict[str, str]) -> None:
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)


class OwnForkServer(ForkServer):
    """The fork server of a run that the process of the tests itself starts: a fork, too."""

    def __init__(self, program: str, preloaded: Any, environment: dict[str, str], log: Path) -> None:
        self._time_limit = fork_server.IMPORT_SECONDS
        self._connection, other_end = socket.socketpair()
        arguments = [str(os.getpid()), program, *preloaded]
        request = _Request(arguments, os.getcwd(), environment, scratch="", serves=True)
        with other_end, log.open("ab") as output:
            process = _server().start([request.write(log.parent)], output.fileno(), other_end.fileno())
        assert process is not None, "the process that imports the libraries has died"
        self._process = process  # type: ignore[assignment]


def _main(path: str, inherited: str) -> None:
    request = _Request(**json.loads(Path(path).read_text()))
    Path(path).unlink()
    if request.serves:
        sys.path.remove(ROOT)
        _replace_environment(request.environment)
        os.chdir(request.cwd)
        fork_server._main(inherited, *request.arguments)
        return
    if request.works:
        _work(request, int(inherited))
        return
    arguments = request.arguments
    if request.has_pipe:
        arguments = [*arguments, inherited]
    else:
        os.dup2(int(inherited), 2)
        os.close(int(inherited))
    if request.terminal:
        os.dup2(1, 0)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for name in [name for name in sys.modules if name.startswith("quartet.cli")]:
            del sys.modules[name]  # Their consoles have looked at the output of the server.
    if not request.nested:
        sys.path.remove(ROOT)
        sys.path[:0] = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    if not (request.nested or request.has_pipe):
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        ctypes.memmove(getenv(MARK.encode()), request.scratch.encode(), len(request.scratch))
    _replace_environment(request.environment)
    os.chdir(request.cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(STACKS, file=2)
    if not request.has_pipe:
        # For its services, and for other processes.
        if _make_standby() or _make_standby():
            return
        atexit.register(_end_standby)
        launcher.ForkServer = _StandbyForkServer  # type: ignore[misc]
        _Popen.scratch = request.scratch
        subprocess.Popen = _Popen  # type: ignore[misc]
    _end(_status(arguments, request.nested))


def _work(request: _Request, connection: int) -> None:
    """Be a worker of the tests, with a fork server that has imported nothing of them."""
    ours, other_end = socket.socketpair()
    worker = os.getpid()
    if (server := os.fork()) == 0:
        ours.close()
        os.close(connection)
        die_with(worker)
        fork_server._main(str(other_end.detach()), str(worker), "tests.e2e.forked_program")
        return
    other_end.close()
    sys.path.remove(ROOT)
    imported = {name: os.environ[name] for name in SET_BY_IMPORTS if name in os.environ}
    # These come last: setproctitle starts at the first variable of a process, and imports replace them.
    environment = {**request.environment, **imported, **request.environment}
    _replace_environment({**environment, SERVER: f"{worker} {server} {ours.detach()}"})
    os.write(connection, b"1")
    for descriptor in (0, 1):
        os.dup2(connection, descriptor)
    os.close(connection)
    # What execnet starts is `python -c` with this line.
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))  # noqa: S102, S307 - the tests start this


def _status(arguments: list[str], nested: bool) -> int:
    """Run the program. Return its exit status."""
    try:
        if arguments[0] != sys.executable:
            from quartet.cli.main import main

            sys.argv = arguments
            main()
        elif "-m" in arguments[1:3]:
            module = arguments.index("-m") + 1
            sys.argv = arguments[module:]
            if nested:
                setproctitle.setproctitle(" ".join([sys.executable, *arguments[1:]]))
            runpy.run_module(arguments[module], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path(arguments[1]).absolute().parent))
            runpy.run_path(arguments[1], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End as the interpreter does, but do not free the libraries: that would copy the memory which forks share."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _main(*sys.argv[1:])
