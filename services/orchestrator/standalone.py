"""An orchestrator that nobody's launcher has started: a container's. It prepares the run's directory itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from quartet.config import Config
from quartet.preflight import check_apart, check_inputs, check_resumable
from quartet.run_directory.run_files import RunFiles
from quartet.topology import roles_of
from quartet.types import Role

log = structlog.get_logger()


@contextmanager
def acquire_run_directory(config: Config) -> Iterator[Callable[[str], None]]:
    """Keeps the run's directory for this process. A run that lies there already goes on: a container is started again as it was.

    Gives what tells others where the run's processes are, to be called with the address that this one listens on. Raises
    ConfigError for wrong input, for a directory that another process keeps, and where the run there is not this config's.
    """
    check_inputs(config)
    check_apart(config)
    files = RunFiles(config.run_directory)
    with files.claimed():
        if files.is_a_run():
            check_resumable(config, files)
        # One that broke off before its first step has left its files, and nothing to go on from.
        continues_from = files.metrics.exists()
        log.info("going on with the run" if continues_from else "beginning the run", directory=str(files.root))
        files.write_config(config.to_yaml())

        def tell(address: str) -> None:
            known = {role: getattr(config.services, role).address for role in roles_of(config)}
            files.write_services({**known, Role.ORCHESTRATOR: config.services.orchestrator.address or address})
            told.append(files.services.stat().st_ino)

        told: list[int] = []
        try:
            yield tell
        finally:
            # Where the file system keeps no locks between machines, another one may have come since.
            with suppress(OSError):
                if told and files.services.stat().st_ino == told[0]:
                    files.services.unlink()
