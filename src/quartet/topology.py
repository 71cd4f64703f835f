"""What runs where: listening addresses and each service's share of the cores. No torch here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quartet.config import Config, OrchestratorServiceConfig, ServiceConfig
from quartet.config import is_loopback as is_loopback
from quartet.types import MODEL_ROLES, TRAINED_ROLES, Role


def listen_address(service: ServiceConfig | OrchestratorServiceConfig) -> str:
    """Where a service that is started here listens: as told, or on loopback at its address's port or a free one."""
    if service.listen is not None:
        return service.listen
    address = service.address if isinstance(service, ServiceConfig) else None
    return f"127.0.0.1:{address.rpartition(':')[2] if address else 0}"


def available_cores() -> int:
    """Cores that this process may use: its affinity, and no more than its control group's quota (a container's limit)."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return found
    return found if quota == "max" else max(1, min(found, round(int(quota) / int(period))))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that is free on this machine, and no more than its control group's limit leaves (a container's).

    Pages of files that can be dropped count as free. All of the machine's memory, where its system does not tell. ``root``: where
    the system tells it.
    """
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        of_files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # No group, or no limit: "max".
        return free
    return max(0, min(free, limit - used + int(of_files)))


def model_roles(config: Config) -> tuple[Role, ...]:
    """The model services of this run: no critic for estimators without one, no reference where the actor answers for it."""
    absent = {Role.CRITIC: not config.has_critic, Role.REFERENCE: not config.has_reference}
    return tuple(role for role in MODEL_ROLES if not absent.get(role))


def num_threads(config: Config, role: Role) -> int:
    """CPU threads of a service: as told, or its share of the cores among the model services of this machine.

    More threads than cores make every service crawl: their pools wait for one another by spinning.
    """
    if role is Role.ORCHESTRATOR:
        return 1
    told: int | None = getattr(config.services, role).num_threads
    if told is not None:
        return told
    return _share(config, role, model_roles(config))


def num_update_threads(config: Config, role: Role) -> int | None:
    """CPU threads of an update by actor or critic: as told, or its share of the cores among those of this machine that learn.

    While they learn, the services that score have nothing to do. None, to leave them as they are, where the next step is
    generated meanwhile: torch has one number for all threads that compute at once.
    """
    if config.rollout.max_off_policy_steps:
        return None
    told: int | None = getattr(config.services, role).num_threads
    return told or _share(config, role, [other for other in model_roles(config) if other in TRAINED_ROLES])


def _share(config: Config, role: Role, roles: Sequence[Role]) -> int:
    here = [other for other in roles if getattr(config.services, other).address is None or other is role]
    return max(1, available_cores() // len(here))


def num_memory_sharers(config: Config, role: Role) -> int:
    """Model services that share memory with ``role``, itself counted: of the same machine, on the device that it learns on."""
    own: ServiceConfig = getattr(config.services, role)
    here = [getattr(config.services, other) for other in model_roles(config) if other is not role]
    near = [other for other in here if other.address is None or _machine(other) == _machine(own)]
    return 1 + sum(bool(own.devices[0] in other.devices if own.devices else not other.devices) for other in near)


def _machine(service: ServiceConfig) -> str:
    """Where others find it; empty for this machine."""
    host = service.address.rpartition(":")[0] if service.address else ""
    return "" if is_loopback(host) else host
