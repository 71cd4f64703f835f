"""Start of the ranks of a test as processes: ``python -m MODULE FOLDER RANK SIZE PORT SOCKET``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 200.0


def run_ranks(module: str, folder: Path, size: int) -> None:
    """Run ``module`` as ``size`` ranks, and wait until all of them have succeeded."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *map(str, (folder, rank, size, port, descriptor))],
                env=environment,
                pass_fds=() if rank else (descriptor,),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
