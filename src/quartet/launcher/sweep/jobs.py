"""The processes of a sweep: a number of runs at a time, and the part of the machine that each gets."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES, TRAINED_ROLES, Role
from quartet.errors import ConfigError
from quartet.system.machine import CONCURRENT_RUNS_VARIABLE

POLL_SECONDS = 0.1
"""Seconds between two checks of the processes."""
Item = TypeVar("Item")


class Job(Protocol):
    """A started process, as ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""

    def terminate(self) -> None:
        """Ask the process to end."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self) -> int:
        """Wait for the end of the process."""


def run_jobs(
    items: Sequence[Item],
    slots: int,
    start: Callable[[Item, int], Job],
    ended: Callable[[Item, int], None],
    waiting: Callable[[list[Item]], None] = lambda _: None,
) -> None:
    """Start a process for each item, ``slots`` at a time, and wait for all. If this is interrupted, stop those that run.

    ``start`` gets the item and the number of its slot from 0, ``ended`` the item and the exit status. ``waiting`` gets the active
    items at every check. Call it from one thread that lives as long: the kernel ties the processes to it.
    """
    queue = deque(items)
    active: dict[int, tuple[Item, Job]] = {}
    try:
        while queue or active:
            for slot in range(slots):
                if queue and slot not in active:
                    item = queue.popleft()
                    active[slot] = item, start(item, slot)
            finished = [(slot, item, code) for slot, (item, job) in active.items() if (code := job.poll()) is not None]
            for slot, item, code in finished:
                del active[slot]
                ended(item, code)
            if not finished:
                waiting([item for item, _ in active.values()])
                time.sleep(POLL_SECONDS)
    finally:
        _stop([job for _, job in active.values()])


def _stop(jobs: Iterable[Job]) -> None:
    """End the processes and wait for them. A second interrupt kills them."""
    jobs = list(jobs)
    try:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.wait()
    except BaseException:
        for job in jobs:
            job.kill()
        for job in jobs:
            job.wait()
        raise


DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def slot_environments(configs: Sequence[Config], jobs: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what ``environment`` gets in addition for the runs of each slot. Raises ConfigError if runs would collide."""
    if jobs == 1:
        return [{}]
    for config in configs:
        check_separable(config, jobs)
    needed = max(map(num_devices, configs))
    shared = {CONCURRENT_RUNS_VARIABLE: str(jobs)}
    if not needed:
        return [shared] * jobs
    devices = visible_devices(environment)
    if len(devices) < jobs * needed:
        raise ConfigError(
            f"--jobs {jobs}: each run needs {needed} GPU{'s' if needed > 1 else ''} by services.ROLE.devices, and this machine "
            f"offers {len(devices)}; lower --jobs to {max(1, len(devices) // needed)}"
        )
    return [
        {**shared, DEVICES_VARIABLE: ",".join(devices[slot * needed : (slot + 1) * needed])} for slot in range(jobs)
    ]


def num_devices(config: Config) -> int:
    """Return the number of GPUs that a run needs: one more than the highest index of its local services."""
    services = config.services
    indices = [
        index
        for role in MODEL_ROLES
        if getattr(services, role).address is None
        for index in getattr(services, role).devices
    ]
    return 1 + max([*indices, *services.generator.devices], default=-1)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes with this environment see, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = environment.get(DEVICES_VARIABLE)
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(
            f"--jobs: the GPUs of this machine cannot be listed with nvidia-smi; name them in {DEVICES_VARIABLE}, such as 0,1"
        ) from None
    return output.split()


def check_separable(config: Config, jobs: int) -> None:
    """Raise ConfigError if two runs with this config cannot be active at once: a fixed port, or a service that one run owns."""
    ports = {"gateway.listen": config.gateway.listen if config.gateway.enabled else None}
    for role in Role:
        service = getattr(config.services, role)
        for name in ("listen", "metrics_listen", "health_listen"):
            ports[f"services.{role}.{name}"] = getattr(service, name)
    for key, address in ports.items():
        if address is not None and not address.endswith(":0"):
            raise ConfigError(
                f"--jobs {jobs}: {key} {address} is one port for all runs; set it to null or to port 0, or use --jobs 1"
            )
    owned = {f"services.{role}.address": getattr(config.services, role).address for role in sorted(TRAINED_ROLES)}
    owned["services.generators"] = ", ".join(config.services.generators) or None
    for key, address in owned.items():
        if address is not None:
            raise ConfigError(
                f"--jobs {jobs}: {key} {address} serves one run at a time; set it to null, or use --jobs 1"
            )
