"""Watching processes while they are fuzzed: whether they live, answer in time, and grow."""

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
from tests.fuzz.ground import Target

EVERY = 1.0
"""Seconds between looks."""
PATIENCE = 2.0
"""Seconds in which health and status answer, whatever else is asked."""
MORE_MEMORY = 30.0
"""MiB by which a process may grow from the end of its warm-up to the end: what allocators keep of the largest requests. A leak
of one request's bytes, a kilobyte, would be 80 MiB in 80,000 requests."""
MORE_FILES = 2
"""Limit for the growth of open files: connections may be open at the time of a look."""
MORE_THREADS = 8
"""Threads by which it may: a worker is started only when all others are busy, so they appear one by one."""


@dataclass(frozen=True)
class Look:
    """Resources of a process after ``sent`` requests: MiB of memory, threads, open files."""

    sent: int
    memory: float
    threads: int
    files: int


def look(pid: int, sent: int) -> Look | None:
    """Return the resources of a process, or None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
        if "VmRSS" not in fields:  # A zombie has none.
            return None
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Look(sent, int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]), files)


class Watch:
    """Monitor of the resources of every target, with one thread per target."""

    def __init__(self, targets: Sequence[Target], sent: Callable[[], int]) -> None:
        self._targets, self._sent = targets, sent
        self._stop = threading.Event()
        self.looks: dict[str, list[Look]] = defaultdict(list)
        self.problems: list[str] = []
        self.slowest = 0.0
        self._threads = [threading.Thread(target=self._watch, args=(target,), daemon=True) for target in targets]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, target: Target) -> None:
        with grpc.insecure_channel(target.address, options=CHANNEL_OPTIONS) as channel:
            while not self._stop.wait(EVERY):
                if problem := self._answers(target, channel):
                    self.problems.append(f"{target.role} after {self._sent()} requests: {problem}")
                if target.pid is None:
                    continue
                result = look(target.pid, self._sent())
                if result is None:
                    self.problems.append(f"{target.role} has ended after {self._sent()} requests")
                    return
                self.looks[target.role].append(result)

    def _answers(self, target: Target, channel: grpc.Channel) -> str:
        try:
            started = time.monotonic()
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            middle = time.monotonic()
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), timeout=PATIENCE
            )
            self.slowest = max(self.slowest, middle - started, time.monotonic() - middle)
        except grpc.RpcError as error:
            return f"health or status did not answer: {error.code().name} {error.details()}"
        if health.status != health_pb2.HealthCheckResponse.SERVING or not status.roles:
            return f"health {health.status}, status of {len(status.roles)} roles"
        return ""

    def growth(self, requests: int) -> tuple[list[str], list[str]]:
        """A line for each process that says how it grew after the first fifth of all requests, and what grew too much."""
        lines, problems = [], []
        for role, looks in self.looks.items():
            early = [result for result in looks if 0.2 * requests <= result.sent < 0.4 * requests]
            late = [result for result in looks if result.sent >= 0.8 * requests]
            if not early or not late:
                problems.append(f"{role}: too few looks at it, {len(looks)}")
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
                ("MiB", "threads", "open files"), (MORE_MEMORY, MORE_THREADS, MORE_FILES), before, after, strict=True
            ):
                if new - old > limit:
                    problems.append(f"{role}: grew from {old:g} to {new:g} {name}, more than {limit:g}")
        return lines, problems
