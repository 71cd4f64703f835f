"""The fork server: its processes are children of the client, which sees their ends and takes them with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quartet.launcher.service_process import ServiceProcess
from quartet.system.child_processes import has_ended
from quartet.system.fork_server import ForkedProcess, ForkServer
from tests.waiting import LIMIT, wait_until

PROGRAM = """
import os, sys, time
import library
print("arguments", sys.argv[1:-1], "library of", library.pid, "parent", os.getppid(), flush=True)
os.write(int(sys.argv[-1]), b"ready")
if sys.argv[1] == "sleep":
    time.sleep(600)
os._exit(int(sys.argv[1]))
"""
LIBRARY = "import os\npid = os.getpid()\n"
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"

Serve = Callable[..., ForkServer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("program", PROGRAM), ("library", LIBRARY), ("threaded", THREADED)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    servers = []

    def start(*preloaded: str) -> ForkServer:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        servers.append(ForkServer("program", preloaded, environment, folder / "server.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def start_program(server: ForkServer, log: Path, *arguments: str) -> ForkedProcess | None:
    """Start the program and wait until it has written to the inherited pipe."""
    reader, writer = os.pipe()
    with log.open("ab") as output, os.fdopen(reader, "rb") as pipe:
        process = server.start(arguments, output.fileno(), writer)
        os.close(writer)
        assert process is None or pipe.read(5) == b"ready"
    return process


def test_a_forked_process_is_a_child_with_the_preloaded_modules_and_its_own_command_line(
    serve: Serve, folder: Path
) -> None:
    server = serve("library", "no_such_module")
    process = start_program(server, folder / "log", "sleep", "two words")
    assert process is not None
    words = (folder / "log").read_text().split()
    assert words[words.index("arguments") + 1 :][:3] == ["['sleep',", "'two", "words']"]
    assert words[-1] == str(os.getpid()), "its parent is not the client"
    assert int(words[words.index("of") + 1]) not in (process.pid, os.getpid()), "it has imported the library itself"
    assert Path(f"/proc/{process.pid}/cmdline").read_text().startswith("program sleep two words")
    assert b"PYTHONPATH=" in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    server.close()
    assert process.poll() is None, "it does not need the server any more"
    process.kill()
    assert (process.wait(LIMIT), process.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    process.kill()  # Another process may have its id by now; this does nothing.


def test_exit_statuses_and_signals_are_reported_for_each_process(serve: Serve, folder: Path) -> None:
    server = serve("library")
    processes = [start_program(server, folder / "log", argument) for argument in ("3", "0", "sleep")]
    assert [process and process.wait(LIMIT) for process in processes[:2]] == [3, 0]
    assert processes[2] is not None
    processes[2].terminate()
    assert processes[2].wait(LIMIT) == -signal.SIGTERM


@pytest.mark.parametrize("preloaded", ["library", "threaded"])
def test_without_a_server_that_can_fork_no_process_starts(preloaded: str, serve: Serve, folder: Path) -> None:
    server = serve(preloaded)
    if preloaded == "library":
        server.close()
    assert start_program(server, folder / "log", "0") is None
    if preloaded == "threaded":
        assert "an imported module has started a thread" in (folder / "server.log").read_text()


def test_a_service_starts_without_the_server_if_that_has_died(serve: Serve, folder: Path) -> None:
    server = serve("library")
    server.close()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    service = ServiceProcess("program", ["program", "7"], environment, folder / "log", fork_server=server)
    assert service.process.wait(LIMIT) == 7
    service.wait_or_kill(time.monotonic())


def test_a_client_that_ignores_the_ends_of_its_children_gets_status_0(serve: Serve, folder: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server = serve("library")
        processes = [start_program(server, folder / "log", "0") for _ in range(2)]
        assert [process and process.wait(LIMIT) for process in processes] == [0, 0]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_server_that_hangs_is_stopped(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("library")
    assert start_program(server, folder / "log", "0") is not None
    monkeypatch.setattr("quartet.system.fork_server.FORK_SECONDS", 0.2)
    assert start_program(server, folder / "log", "0") is not None
    os.kill(server.pid, signal.SIGSTOP)
    start = time.monotonic()
    assert start_program(server, folder / "log", "0") is None
    assert start_program(server, folder / "log", "0") is None
    assert time.monotonic() - start < 3
    assert not Path(f"/proc/{server.pid}").exists()


CLIENT = """
import os, sys, time
from pathlib import Path
from quartet.system.child_processes import _identity
from quartet.system.fork_server import ForkServer
server = ForkServer("program", ["library"], dict(os.environ), Path("server.log"))
process = server.start(["sleep"], 2, 2)
print(_identity(process.pid), flush=True)
time.sleep(600)
"""


def test_a_forked_process_dies_with_the_client(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as client:
        assert client.stdout is not None
        name = client.stdout.readline().strip()
        assert not has_ended(name)
        client.kill()
    wait_until(lambda: has_ended(name))
