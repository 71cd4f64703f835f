"""The processes of a live run: whether they answer, what they are, how busy they are."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet import codec
from quartet.config import redact_url
from quartet.errors import MismatchError, NoResponse, QuartetError, ServiceUnavailable
from quartet.gateway.monitors.buffer_address import Buffers
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import ServiceInfo
from quartet.rpc.channels import ServiceChannel
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.types import TRAINED_ROLES, ServiceStatus
from quartet.v1 import status_pb2, status_pb2_grpc

DEADLINE = 1.0
"""Seconds that a process has to answer."""
FRESH = 1.0
"""Seconds for which a look is good enough for the next who asks: many viewers cost one."""
WORKERS = 8
"""Processes that are asked at once."""


@dataclass(slots=True)
class _Seen:
    """One process as it was seen last."""

    peer: ServiceChannel
    busy: float | None = None
    at: float = 0.0


@dataclass(slots=True)
class _Run:
    """The last look at one run's processes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    addresses: dict[str, str] = field(default_factory=dict)
    found: list[ServiceInfo] = field(default_factory=list)
    seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)


class Services:
    """Looks at the processes of runs. Safe to use from several threads."""

    def __init__(self, runs: Runs, buffers: Buffers, credentials: Credentials = LOCAL) -> None:
        self._runs, self._buffers, self._credentials = runs, buffers, credentials
        self._known: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="services")

    def look(self, name: str) -> list[ServiceInfo]:
        """Every process of the run, in the order of the config; none where it does not go on. Raises NotFound."""
        files = self._runs.find(name)
        with self._lock:
            run = self._known.setdefault(name, _Run())
        with run.lock:
            addresses = _addresses(files)
            if time.monotonic() - run.at >= FRESH or addresses != run.addresses:
                run.found, run.addresses = self._look(name, run, addresses), addresses
                run.at = time.monotonic()
            return run.found

    def close(self) -> None:
        """Closes the channels."""
        self._workers.shutdown(cancel_futures=True)
        with self._lock:
            for run in self._known.values():
                for seen in run.seen.values():
                    seen.peer.close()
            self._known.clear()

    def _look(self, name: str, run: _Run, addresses: dict[str, str]) -> list[ServiceInfo]:
        for place in set(run.seen) - set(addresses.items()):
            run.seen.pop(place).peer.close()
        for role, address in addresses.items():
            if (role, address) not in run.seen:
                run.seen[role, address] = _Seen(ServiceChannel(role, address, self._credentials))
        pending = [self._workers.submit(_ask, role, run.seen[role, address]) for role, address in addresses.items()]
        redis = self._workers.submit(self._ask_redis, name) if addresses else None
        return [answer.result() for answer in pending] + (redis.result() if redis else [])

    def _ask_redis(self, name: str) -> list[ServiceInfo]:
        url = self._buffers.url(name)
        if url is None:
            return []
        problem = self._buffers.problem(url)
        return [
            ServiceInfo(
                role="redis",
                address=redact_url(url),
                health="unreachable" if problem else "serving",
                detail=problem,
            )
        ]


def _addresses(files: RunFiles) -> dict[str, str]:
    try:
        found = json.loads(files.services.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(role): str(address) for role, address in found.items()} if isinstance(found, dict) else {}


def _ask(role: str, seen: _Seen) -> ServiceInfo:
    """One process's status and health."""
    address = seen.peer.address
    try:
        status = _status(role, seen.peer)
        request = health_pb2.HealthCheckRequest()
        health = seen.peer.call(health_pb2_grpc.HealthStub(seen.peer.channel).Check, request, DEADLINE, "Check")
    except QuartetError as error:
        seen.busy = None
        silent = isinstance(error, ServiceUnavailable | NoResponse)
        if silent:
            # A connection that was lost comes back the later the longer it was.
            seen.peer.close()
            seen.peer = seen.peer.again()
        detail = f"does not answer within {DEADLINE:g} s" if isinstance(error, NoResponse) else str(error)
        return ServiceInfo(
            role=role,
            address=address,
            health="unreachable" if silent else "not_serving",
            detail="nothing answers there" if isinstance(error, ServiceUnavailable) else detail,
        )
    problem = _problem(status, health.status == health_pb2.HealthCheckResponse.SERVING)
    return ServiceInfo(
        role=role,
        address=address,
        health="not_serving" if problem else "serving",
        detail=problem,
        model=status.model or None,
        device=status.device or None,
        dtype=status.dtype or None,
        parameters=status.parameters or None,
        policy_version=status.policy_version if role in TRAINED_ROLES else None,
        step=status.step,
        micro_batch_tokens=status.micro_batch_tokens or None,
        gradient_checkpointing=status.gradient_checkpointing if status.micro_batch_tokens else None,
        busy_seconds=status.busy_seconds,
        load=_load(seen, sum(status.busy_seconds.values())) if status.busy_seconds else None,
    )


def _status(role: str, peer: ServiceChannel) -> ServiceStatus:
    stub = status_pb2_grpc.StatusServiceStub(peer.channel)
    answer = peer.call(stub.GetStatus, status_pb2.GetStatusRequest(), DEADLINE, "GetStatus")
    statuses = [codec.status_from_proto(message) for message in answer.roles]
    for status in statuses:
        if status.role == role:
            return status
    raise MismatchError(f"another role answers there, expected the {role}; correct services.{role}.address")


def _problem(status: ServiceStatus, serving: bool) -> str:
    if not serving:
        return "says that it does not serve: it is starting, or ending"
    if status.broken:
        return "an update or a restore broke off; the run restores it"
    if status.buffer_unreachable:
        return "does not reach the rollout buffer"
    return ""


def _load(seen: _Seen, busy: float) -> float | None:
    now = time.monotonic()
    before, then = seen.busy, seen.at
    seen.busy, seen.at = busy, now
    # A process that was started anew counts from 0 again.
    if before is None or busy < before or now <= then:
        return None
    return min(1.0, (busy - before) / (now - then))
