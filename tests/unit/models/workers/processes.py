"""Groups of test processes that meet at a socket of this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def run_ranks(program: ModuleType, folder: Path, size: int, *arguments: object) -> None:
    """Run ``python -m PROGRAM FOLDER RANK SIZE PORT SOCKET [ARGUMENT ...]`` for each rank, and wait for all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    port, descriptor = listener.getsockname()[1], listener.fileno()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program.__name__, *map(str, (folder, number, size, port, descriptor, *arguments))],
            env=environment,
            pass_fds=() if number else (descriptor,),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(size)
    ]
    listener.close()
    try:
        for process in processes:
            output, _ = process.communicate(timeout=500)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
