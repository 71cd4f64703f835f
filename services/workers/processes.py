"""The processes of a worker group. The process of the service is rank 0, and starts the others as its children.

With torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, torchrun has started all of them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import setproctitle

from quartet.child_processes import die_with
from quartet.errors import ConfigError
from quartet.types import Role

LOOPBACK = "127.0.0.1"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets in each process."""


@dataclass(slots=True)
class RankProcess:
    """This process as one of ``size`` ranks. A service of one process is rank 0 of 1.

    ``port``: loopback port at which the ranks meet; None if torchrun's variables name the address. ``listener``: the socket of
    that port, in rank 0. ``children``: process ids by rank, in rank 0.
    """

    rank: int = 0
    size: int = 1
    port: int | None = None
    listener: socket.socket | None = None
    children: dict[int, int] = field(default_factory=dict)

    def failure(self) -> str:
        """Return how a child has ended, or "" while all of them run. Never waits."""
        for rank, pid in self.children.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                return f"rank {rank} of {self.size} (process {pid}): {how}"
        return ""


def start_ranks(role: Role, size: int, environment: Mapping[str, str]) -> RankProcess:
    """Return this process's rank in a group of ``size``. Without torchrun, fork the other ranks, in which this returns, too.

    The children die with this process. Call it before the process has threads. Raises ConfigError if torchrun started another
    number of processes.
    """
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return _started_by_torchrun(role, size, environment)
    if size == 1:
        return RankProcess()
    if not hasattr(os, "fork"):
        raise ConfigError(f"services.{role}: a group of {size} processes, but this system cannot fork; set one")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("CUDA has started before the other ranks were forked, which cannot use it then")
    listener = socket.create_server((LOOPBACK, 0), backlog=size)
    port, parent = listener.getsockname()[1], os.getpid()
    children: dict[int, int] = {}
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            # The parent drains its calls, and its end ends this process.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            setproctitle.setproctitle(f"{setproctitle.getproctitle()} (rank {rank} of {size})")
            listener.close()
            return RankProcess(rank, size, port)
        children[rank] = pid
    return RankProcess(0, size, port, listener, children)


def _started_by_torchrun(role: Role, size: int, environment: Mapping[str, str]) -> RankProcess:
    missing = [name for name in TORCHRUN if not environment.get(name)]
    if missing:
        raise ConfigError(f"environment: {', '.join(TORCHRUN)} come together, {missing[0]} is missing; use torchrun")
    rank, started = environment["RANK"], environment["WORLD_SIZE"]
    if not rank.isdecimal() or started != str(size) or int(rank) >= size:
        raise ConfigError(
            f"environment: rank {rank} of {started} processes, but the config gives {size} (services.{role}.processes, or one "
            "per device); start as many processes with torchrun, or unset RANK and WORLD_SIZE"
        )
    return RankProcess(int(rank), size)


def loopback_interface() -> str:
    """Return the name of the loopback network interface."""
    return "lo0" if sys.platform == "darwin" else "lo"
