"""The processes of a worker group. The process of the service is rank 0, and starts the others as its children.

With torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, torchrun has started all of them, on one
machine or on several.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import setproctitle

from quartet.config.deployment import ServiceConfig
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.system.child_processes import die_with

LOOPBACK = "127.0.0.1"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets in each process."""
MAX_REPORT_BYTES = 32 * 1024
"""Largest report of a child. A pipe takes it without waiting for its reader."""
MAX_REPORT_CHARACTERS = 2000


@dataclass(slots=True)
class RankProcess:
    """This process as one of ``size`` ranks. A service of one process is rank 0 of 1.

    ``host`` and ``port``: address of the store in which the ranks meet. ``serves_store``: this process serves it. ``listener``:
    the socket of that port, in rank 0, if it is open. ``children``: process ids by rank, in a rank 0 that has started the others.
    """

    rank: int = 0
    size: int = 1
    host: str = LOOPBACK
    port: int = 0
    serves_store: bool = False
    listener: socket.socket | None = None
    children: dict[int, int] = field(default_factory=dict)
    reports: dict[int, int] = field(default_factory=dict)
    """Descriptors of pipes: in rank 0, those of its children, by rank; in a child, its own one, by its rank."""
    ended: int = 0
    """Rank of the child of ``failure``."""
    error: tuple[str, str] = ("", "")
    """The error that has ended this child, and its class in ``quartet.errors``, if the child has reported them."""
    killed: bool = False
    """True if a signal has ended this child. A restart of the group may help."""
    _failure: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failure(self) -> str:
        """Return how a child has ended, or "" while all of them run. Never waits. May be called from any thread."""
        with self._lock:
            ended = {}
            for rank, pid in self.children.items() if not self._failure else ():
                process, status = os.waitpid(pid, os.WNOHANG)
                if process:
                    ended[rank] = os.waitstatus_to_exitcode(status)
            if ended:
                # A rank that is killed takes the others with it.
                self.ended = rank = min(ended, key=lambda rank: (ended[rank] > 0, rank))
                code = ended[rank]
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                self.error, self.killed = self._read_report(rank), code < 0
                self._failure = f"rank {rank} of {self.size} (process {self.children[rank]}): {how}"
            return self._failure

    def _read_report(self, rank: int) -> tuple[str, str]:
        """Return the error and its class that a child has reported, or empty texts."""
        try:
            data = os.read(self.reports[rank], MAX_REPORT_BYTES)
        except (KeyError, BlockingIOError):  # A process that the child has left may hold the pipe open.
            data = b""
        error, kind = json.loads(data or b'["", ""]')
        return error, kind

    def report(self, error: str, kind: str) -> bool:
        """Report the error that ends this process, and its class, to the rank 0 that has started it. Return whether one has."""
        if not self.rank or self.rank not in self.reports:
            return False
        message = json.dumps([error[:MAX_REPORT_CHARACTERS], kind])
        with suppress(OSError):  # Rank 0 has ended.
            os.write(self.reports[self.rank], message.encode())
        return True

    def kill(self) -> None:
        """Kill the children."""
        self.failure()
        for pid in self.children.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_ranks(role: Role, service: ServiceConfig, environment: Mapping[str, str]) -> RankProcess:
    """Return this process's rank in the group of a service. Without torchrun, fork the other ranks, in which this returns, too.

    The children die with this process. Call it before the process has threads. Raises ConfigError if torchrun started another
    number of processes, or is needed and has not started this one.
    """
    size = service.num_ranks
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return _started_by_torchrun(role, service, environment)
    if service.nodes > 1:
        raise ConfigError(
            f"services.{role}.nodes {service.nodes}: the processes of several nodes are started by torchrun, and RANK and "
            f"WORLD_SIZE are not set; on every node, run: torchrun --nnodes {service.nodes} --node-rank NODE --nproc-per-node "
            f"{size // service.nodes} --master-addr HOST --master-port PORT -m quartet.services {role} --config CONFIG"
        )
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
    reports: dict[int, int] = {}
    for rank in range(1, size):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        pid = os.fork()
        if pid == 0:
            for descriptor in (reader, *reports.values()):
                os.close(descriptor)
            die_with(parent)
            _ignore_signals()
            setproctitle.setproctitle(f"{setproctitle.getproctitle()} (rank {rank} of {size})")
            listener.close()
            return RankProcess(rank, size, port=port, reports={rank: writer})
        os.close(writer)
        children[rank], reports[rank] = pid, reader
    return RankProcess(0, size, LOOPBACK, port, True, listener, children, reports)


def _ignore_signals() -> None:
    """Leave signals to rank 0, which drains its calls. Its end ends this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _started_by_torchrun(role: Role, service: ServiceConfig, environment: Mapping[str, str]) -> RankProcess:
    missing = [name for name in TORCHRUN if not environment.get(name)]
    if missing:
        raise ConfigError(f"environment: {', '.join(TORCHRUN)} come together, {missing[0]} is missing; use torchrun")
    rank, started, port = environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_PORT"]
    size = service.num_ranks
    if not rank.isdecimal() or started != str(size) or int(rank) >= size:
        nodes = f" on each of {service.nodes} nodes" if service.nodes > 1 else ""
        raise ConfigError(
            f"environment: rank {rank} of {started} processes, but the config gives {size // service.nodes}{nodes} "
            f"(services.{role}.processes, or one per device); start as many processes with torchrun, or unset RANK and WORLD_SIZE"
        )
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if local and local != str(size // service.nodes):
        raise ConfigError(
            f"environment: torchrun started {local} of {size} processes on this machine, but the config gives "
            f"{size // service.nodes} on each of {service.nodes} (services.{role}.nodes {service.nodes}); set "
            f"services.{role}.nodes to the number of machines, or change --nproc-per-node"
        )
    if not port.isdecimal():
        raise ConfigError(f"environment: MASTER_PORT {port!r}: expected the number of a port; use torchrun")
    if "TORCHELASTIC_RUN_ID" in environment:
        # torchrun itself leaves its processes behind if it is killed.
        die_with(os.getppid())
    if int(rank):
        _ignore_signals()
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves_store = rank == "0" and not agent_serves
    return RankProcess(int(rank), size, environment["MASTER_ADDR"], int(port), serves_store)


def interface_towards(host: str) -> str:
    """Return the name of the network interface over which this machine reaches ``host``, or "" if that is unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket selects the route and sends nothing.
            probe.connect((host, 9))
            own = probe.getsockname()[0]
        if own.startswith("127."):
            return "lo0" if sys.platform == "darwin" else "lo"
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), "")
    except OSError:
        return ""


def _address_of(interface: str) -> str:
    """Return the first IPv4 address of a network interface, or "". Only on Linux."""
    import fcntl  # Not on every system.

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
