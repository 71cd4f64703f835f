"""Groups of test processes that meet at a socket of this process. They are forks of a process that has imported torch once."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from types import ModuleType

from tests.e2e.forked_program import start


def run_ranks(program: ModuleType, folder: Path, size: int, *arguments: object) -> None:
    """Run ``python -m PROGRAM FOLDER RANK SIZE PORT SOCKET [ARGUMENT ...]`` for each rank, and wait for all of them."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()}
    outputs = [folder / f"output-{number}.txt" for number in range(size)]
    processes = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
            port = listener.getsockname()[1]
            for number, path in enumerate(outputs):
                own = [program.__name__, *map(str, (folder, number, size, port, *arguments))]
                with path.open("wb") as output:
                    descriptor = output.fileno()
                    command = [sys.executable, "-m", __name__, *own]
                    process = start(
                        command, Path.cwd(), environment, folder, descriptor, descriptor, pipe=listener.fileno()
                    )
                processes.append(process)
        for process, path in zip(processes, outputs, strict=True):
            assert process.wait(500) == 0, path.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run_rank(program: str, folder: str, number: str, size: str, port: str, *arguments: str) -> None:
    *given, listener = arguments
    if int(number):  # A rank that connects before rank 0 listens must be refused, not wait, once rank 0 has died.
        os.close(int(listener))
    sys.argv = [program, folder, number, size, port, listener, *given]
    runpy.run_module(program, run_name="__main__")


if __name__ == "__main__":
    _run_rank(*sys.argv[1:])
