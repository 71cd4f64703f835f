"""Leadership of a run: the lock of its directory, the lease in Redis, and the state that each new leader starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from quartet.buffer.lease import Lease
from quartet.config.layout import service_roles
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.preflight import check_earlier_run, check_inputs, check_separate_orchestrator
from quartet.preflight.findings import raise_errors
from quartet.run_directory.locking_and_removal import lock_run_directory
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.checkpointing.recovery import Recovery, RecoveryPoint
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Leadership:
    """One term of leadership: its lease, the point where the run continues, and the algorithm's state from there on."""

    lease: Lease
    algorithm_state: AlgorithmState
    recovery: Recovery
    recovery_point: RecoveryPoint
    profiler: StepProfiler

    @property
    def epoch(self) -> int:
        """Leader epoch of every request, so that a service refuses the requests of a former leader."""
        return self.lease.epoch

    def check(self) -> None:
        """Renew the lease. Raises FailedPrecondition if it is lost."""
        with self.profiler.span("redis", "lease"):
            self.lease.check()


def acquire_lease(run: RunContext, owner: str, held: Lease | None, epochs_seen: Iterable[int]) -> Lease:
    """Acquire the lease with an epoch above ``epochs_seen``, and release the one ``held`` before.

    The epoch is new even for the same owner, because requests of its last term may still be in progress. Raises
    LeadershipConflict if another orchestrator holds the lease.
    """
    newest = max(epochs_seen, default=0)
    if held is not None:
        held.release()
        newest = max(newest, held.epoch)
    lease = Lease(run.redis, run.url, run.config.run.name, min_epoch=1 + newest, owner=owner)
    log.info("leadership acquired", epoch=lease.epoch)
    return lease


@contextmanager
def acquire_run_directory(config: Config) -> Iterator[Callable[[str], None]]:
    """Lock the run's directory for an orchestrator without a launcher, such as a container's, and prepare it.

    A run in the directory is resumed, because a container is restarted with the same command. Yields a function that publishes
    the addresses of the run's processes; call it with the address that this process listens on. Raises ConfigError for invalid
    input, for a directory locked by another process, and if the run there does not match the config.
    """
    found = [*check_separate_orchestrator(config), *check_inputs(config)]
    raise_errors(found)
    for finding in found:
        if finding.level == "warning":
            log.warning(f"{finding.where}: {finding.what}")
    files = RunFiles(config.run_directory)
    with lock_run_directory(files):
        if files.is_run():
            check_earlier_run(config, files, resume=True)
        # A run that ended before its first step leaves files, but nothing to resume.
        resumes = files.metrics.exists()
        log.info("run resumed" if resumes else "run started", directory=str(files.root))
        files.write_config(config.to_yaml())
        files.outcome.unlink(missing_ok=True)
        published: list[int] = []

        def publish_addresses(address: str) -> None:
            addresses = {role: getattr(config.services, role).addresses for role in service_roles(config)}
            files.write_services({**addresses, Role.ORCHESTRATOR: (config.services.orchestrator.address or address,)})
            published.append(files.services.stat().st_ino)

        try:
            yield publish_addresses
        finally:
            # On a file system without locks between machines, another orchestrator may have replaced the file.
            with suppress(OSError):
                if published and files.services.stat().st_ino == published[0]:
                    files.services.unlink()
