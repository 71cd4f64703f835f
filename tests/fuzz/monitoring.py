"""Monitor of fuzzed processes: liveness, response times, and growth of memory, threads and open files."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.rpc.limits import CHANNEL_OPTIONS
from quartet.v1 import status_pb2, status_pb2_grpc
from tests.fuzz.environment import Target

INTERVAL = 1.0
"""Seconds between samples."""
TIMEOUT = 2.0
"""Maximum response time of health and status in seconds, under any load."""
MAX_MEMORY_GROWTH = 30.0
"""Maximum growth after the warm-up in MiB. The allocator keeps memory of the largest requests. A leak of one kilobyte per request
would be 80 MiB in 80,000 requests."""
MAX_FILE_GROWTH = 2
"""Maximum growth of open files. Connections may be open during a sample."""
MAX_THREAD_GROWTH = 8
"""Maximum growth of threads. A pool starts a worker only if all others are busy, so workers appear one by one."""


@dataclass(frozen=True)
class ResourceUsage:
    """Resources of a process after ``sent`` requests: MiB of memory, threads, open files."""

    sent: int
    memory: float
    threads: int
    files: int


def resource_usage(pid: int, sent: int) -> ResourceUsage | None:
    """Return the resources of a process, or None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
        if "VmRSS" not in fields:  # A zombie has none.
            return None
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return ResourceUsage(sent, int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]), files)


class Monitor:
    """Monitor of every target, with one thread per target."""

    def __init__(self, targets: Sequence[Target], sent: Callable[[], int]) -> None:
        self._targets, self._sent = targets, sent
        self._stop = threading.Event()
        self.samples: dict[str, list[ResourceUsage]] = defaultdict(list)
        self.problems: list[str] = []
        self.slowest = 0.0
        self._threads = [threading.Thread(target=self._run, args=(target,), daemon=True) for target in targets]

    def __enter__(self) -> Monitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Target) -> None:
        with grpc.insecure_channel(target.address, options=CHANNEL_OPTIONS) as channel:
            while not self._stop.wait(INTERVAL):
                if problem := self._check(target, channel):
                    self.problems.append(f"{target.role} after {self._sent()} requests: {problem}")
                if target.pid is None:
                    continue
                result = resource_usage(target.pid, self._sent())
                if result is None:
                    self.problems.append(f"{target.role} has ended after {self._sent()} requests")
                    return
                self.samples[target.role].append(result)

    def _check(self, target: Target, channel: grpc.Channel) -> str:
        try:
            started = time.monotonic()
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            middle = time.monotonic()
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), timeout=TIMEOUT
            )
            self.slowest = max(self.slowest, middle - started, time.monotonic() - middle)
        except grpc.RpcError as error:
            return f"health or status did not respond: {error.code().name} {error.details()}"
        if health.status != health_pb2.HealthCheckResponse.SERVING or not status.roles:
            return f"health {health.status}, status of {len(status.roles)} roles"
        return ""

    def growth(self, requests: int) -> tuple[list[str], list[str]]:
        """Return a line for each process with its growth after the first fifth of all requests, and messages for leaks."""
        lines, problems = [], []
        for role, samples in self.samples.items():
            early = [result for result in samples if 0.2 * requests <= result.sent < 0.4 * requests]
            late = [result for result in samples if result.sent >= 0.8 * requests]
            if not early or not late:
                problems.append(f"{role}: too few samples: {len(samples)}")
                continue
            before, after = (
                [statistics.median(getattr(result, name) for result in part) for name in ("memory", "threads", "files")]
                for part in (early, late)
            )
            lines.append(
                f"{role}: {before[0]:.1f} -> {after[0]:.1f} MiB, {before[1]:g} -> {after[1]:g} threads, "
                f"{before[2]:g} -> {after[2]:g} open files"
            )
            for name, limit, old, new in zip(
                ("MiB", "threads", "open files"),
                (MAX_MEMORY_GROWTH, MAX_THREAD_GROWTH, MAX_FILE_GROWTH),
                before,
                after,
                strict=True,
            ):
                if new - old > limit:
                    problems.append(f"{role}: grew from {old:g} to {new:g} {name}, more than {limit:g}")
        return lines, problems
