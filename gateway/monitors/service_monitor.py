"""Health, identity and load of the processes of an active run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from quartet.config.url_redaction import redact_url
from quartet.contract.status import TRAINED_ROLES, GeneratorInfo, GeneratorState, ProcessStatus, Role, ServiceStatus
from quartet.contract.weights import PublishedWeights, WeightTransfer
from quartet.errors import ConfigError, MismatchError, NoResponse, QuartetError, ServiceUnavailable
from quartet.gateway.monitors.buffer_monitor import BufferMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import ServiceInfo, WeightPublicationInfo, WeightTransferInfo
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel, endpoints_at
from quartet.run_directory.run_files import RunFiles

TIMEOUT_SECONDS = 1.0
"""Time that a process has to respond."""
MAX_AGE_SECONDS = 1.0
"""Age up to which a poll is reused, so that many viewers cause one poll."""
MAX_PARALLEL_POLLS = 8
"""Maximum number of processes that are polled at the same time."""

REPLICATED = tuple(role for role in Role if role.replicated)
"""Roles of which a host name with several addresses has several replicas."""
Addresses = dict[str, tuple[str, ...]]
"""Addresses of the processes of a run, by role."""


@dataclass(slots=True)
class _MonitoredService:
    """The channel to one process, and its busy time at the last poll."""

    channel: ServiceChannel
    busy_seconds: float | None = None
    polled_at: float = 0.0


@dataclass(slots=True)
class _PolledRun:
    """The last poll of one run's processes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    polled_at: float = float("-inf")
    addresses: Addresses = field(default_factory=dict)
    infos: list[ServiceInfo] = field(default_factory=list)
    services: dict[tuple[str, str], _MonitoredService] = field(default_factory=dict)
    orchestrator: OrchestratorClient | None = None
    credentials: Credentials = LOCAL
    generators: list[GeneratorInfo] = field(default_factory=list)
    """The generators, as the orchestrator listed them last."""


class ServiceMonitor:
    """Monitor that polls the processes of runs on request. Thread-safe."""

    def __init__(self, catalog: RunCatalog, buffers: BufferMonitor) -> None:
        self._catalog, self._buffers = catalog, buffers
        self._runs: dict[str, _PolledRun] = {}
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(MAX_PARALLEL_POLLS, thread_name_prefix="services")

    def services(self, name: str) -> list[ServiceInfo]:
        """Return every process of a run in the order of the config; empty if the run is not active.

        Raises NotFound, and ConfigError if the config or the credentials cannot be read.
        """
        files = self._catalog.find(name)
        with self._lock:
            run = self._runs.setdefault(name, _PolledRun())
        with run.lock:
            addresses = _addresses(files)
            if time.monotonic() - run.polled_at >= MAX_AGE_SECONDS or addresses != run.addresses:
                run.infos, run.addresses = self._poll(name, run, addresses), addresses
                run.polled_at = time.monotonic()
            return run.infos

    def close(self) -> None:
        """Close the channels."""
        self._workers.shutdown(cancel_futures=True)
        with self._lock:
            for run in self._runs.values():
                for service in run.services.values():
                    service.channel.close()
                if run.orchestrator is not None:
                    run.orchestrator.close()
            self._runs.clear()

    def _poll(self, name: str, run: _PolledRun, addresses: Addresses) -> list[ServiceInfo]:
        if addresses and run.credentials is LOCAL:
            run.credentials = self._catalog.credentials(name)
        run.generators = self._generators(name, run, next(iter(addresses.get(Role.ORCHESTRATOR, ())), None))
        generators = {item.address: item for item in run.generators}
        keys = [(role, endpoint) for role, each in addresses.items() for endpoint in _endpoints(role, each)]
        keys += [(str(Role.GENERATOR), address) for address in generators]
        for key in set(run.services) - set(keys):
            run.services.pop(key).channel.close()
        for role, address in keys:
            if (role, address) not in run.services:
                run.services[role, address] = _MonitoredService(ServiceChannel(role, address, run.credentials))
        pending = [
            self._workers.submit(_poll_service, role, run.services[role, address], generators.get(address))
            for role, address in keys
        ]
        redis = self._workers.submit(self._poll_redis, name) if addresses else None
        return [result.result() for result in pending] + (redis.result() if redis else [])

    def _generators(self, name: str, run: _PolledRun, address: str | None) -> list[GeneratorInfo]:
        """Return the generators in separate processes. While the orchestrator does not respond: those of its last response."""
        if run.orchestrator is not None and run.orchestrator.address != address:
            run.orchestrator.close()
            run.orchestrator, run.generators = None, []
        try:
            if address is None or not self._catalog.config(name).has_generators:
                return []
            if run.orchestrator is None:
                run.orchestrator = OrchestratorClient(address, TIMEOUT_SECONDS, run.credentials)
            return run.orchestrator.generators()
        except ConfigError:
            return []
        except QuartetError:
            if run.orchestrator is not None:
                # gRPC's reconnect delay grows with the time a connection has been lost.
                run.orchestrator.close()
                run.orchestrator = None
            return run.generators

    def _poll_redis(self, name: str) -> list[ServiceInfo]:
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


def _addresses(files: RunFiles) -> Addresses:
    """Return the addresses in services.json by role; none if the file is missing or damaged."""
    try:
        content = json.loads(files.services.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        str(role): tuple(map(str, each)) if isinstance(each, list) else (str(each),) for role, each in content.items()
    }


def _endpoints(role: str, addresses: Sequence[str]) -> list[str]:
    """Return the addresses of a role, or of each of its replicas."""
    if role not in REPLICATED:
        return list(addresses)
    return list(dict.fromkeys(endpoint for address in addresses for endpoint in endpoints_at(address) or [address]))


def _poll_service(role: str, service: _MonitoredService, generator: GeneratorInfo | None = None) -> ServiceInfo:
    """Return the status and health of one process. ``generator`` is what the orchestrator knows about a generator."""
    address = service.channel.address
    if generator is not None and generator.state is GeneratorState.LOST:
        # Asking hundreds of lost ones again would delay the others.
        service.busy_seconds = None
        return ServiceInfo(
            role=role, address=address, health="unreachable", detail="does not respond to the orchestrator"
        )
    try:
        process = service.channel.status(TIMEOUT_SECONDS)
        status = _status(role, process)
        serving = service.channel.is_serving(TIMEOUT_SECONDS)
    except QuartetError as error:
        service.busy_seconds = None
        unreachable = isinstance(error, ServiceUnavailable | NoResponse)
        if unreachable:
            # gRPC's reconnect delay grows with the time a connection has been lost. A new channel connects at once.
            service.channel.close()
            service.channel = service.channel.reconnected()
        detail = f"does not respond within {TIMEOUT_SECONDS:g} s" if isinstance(error, NoResponse) else str(error)
        return ServiceInfo(
            role=role,
            address=address,
            health="unreachable" if unreachable else "not_serving",
            detail="no process listens at this address" if isinstance(error, ServiceUnavailable) else detail,
        )
    problem = _problem(status, serving)
    if generator is not None and generator.reason:
        problem = f"gets no work until it is restarted: {generator.reason}"
    generated, generating = status.tokens.get("generated"), status.busy_seconds.get("generate", 0.0)
    return ServiceInfo(
        role=role,
        address=address,
        health="not_serving" if problem else "serving",
        detail=problem,
        model=status.model or None,
        device=status.device or None,
        dtype=status.dtype or None,
        parameters=status.parameters or None,
        policy_version=status.policy_version if role in (*TRAINED_ROLES, Role.GENERATOR) else None,
        step=status.step if role not in (Role.GENERATOR, Role.ENVIRONMENT) else None,
        micro_batch_tokens=status.micro_batch_tokens or None,
        gradient_checkpointing=status.gradient_checkpointing if status.micro_batch_tokens else None,
        busy_seconds=status.busy_seconds,
        load=_load(service, sum(status.busy_seconds.values())) if status.busy_seconds else None,
        work_pending=status.work_pending if role != Role.ORCHESTRATOR else None,
        open_sessions=status.open_sessions if role == Role.ENVIRONMENT else None,
        trajectories=generator.trajectories if generator is not None else None,
        tokens_generated=generated,
        tokens_per_second=generated / generating if generated and generating else None,
        devices=list(process.devices),
        **_weights(status),
    )


def _weights(status: ServiceStatus) -> dict[str, Any]:
    """Return the fields of an engine and of its weights."""
    transfer, publication = status.last_transfer, status.last_publication
    return {
        "engine": status.engine,
        "published_versions": sorted(status.published_weights),
        "last_transfer": WeightTransferInfo(**_with_hex_digest(transfer)) if transfer else None,
        "last_publication": WeightPublicationInfo(**_with_hex_digest(publication)) if publication else None,
    }


def _with_hex_digest(measured: WeightTransfer | PublishedWeights) -> dict[str, Any]:
    fields = asdict(measured)
    return {"digest": fields.pop("weights_digest").hex(), **fields}


def _status(role: str, process: ProcessStatus) -> ServiceStatus:
    for status in process.roles:
        if status.role == role:
            return status
    raise MismatchError(
        f"a process of another role listens there, expected the {role}; correct services.{role}.address"
    )


def _problem(status: ServiceStatus, serving: bool) -> str:
    if not serving:
        return "reports that it does not serve: it is starting or stopping"
    if status.broken:
        return "an update or a restore was interrupted; the run restores the service from a checkpoint"
    if status.buffer_unreachable:
        return "cannot reach the rollout buffer"
    return ""


def _load(service: _MonitoredService, busy_seconds: float) -> float | None:
    """Return the fraction of the time since the last poll that the process was busy, or None if that is unknown."""
    now = time.monotonic()
    before, then = service.busy_seconds, service.polled_at
    service.busy_seconds, service.polled_at = busy_seconds, now
    # A restarted process counts from 0 again.
    if before is None or busy_seconds < before or now <= then:
        return None
    return min(1.0, (busy_seconds - before) / (now - then))
