"""Active runs with an orchestrator that responds, for tests of the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quartet.contract.status import MODEL_ROLES
from tests.gateway.serving import TIMEOUT, serve_orchestrator
from tests.training.conftest import MakeConfig
from tests.training.runs import ActiveRun, Fleet, fleet, orchestrator


@contextmanager
def start_live_run(
    make: MakeConfig, folder: Path, name: str, steps: int = 400, **changes: Any
) -> Iterator[tuple[ActiveRun, Fleet]]:
    """Start a run whose orchestrator accepts calls."""
    config = make(
        run={"name": name, "steps": steps, "directory": str(folder)}, checkpoint={"every_steps": 1000}, **changes
    )
    with fleet(config) as services, orchestrator(services.config) as running:
        addresses = {role: getattr(services.config.services, role).address for role in MODEL_ROLES}
        with serve_orchestrator(running, addresses):
            yield running, services


def eventually(read: Callable[[], Any], condition: Callable[[Any], bool]) -> Any:
    """Return the first value read that meets the condition."""
    deadline = time.monotonic() + TIMEOUT
    while not condition(value := read()):
        assert time.monotonic() < deadline, value
        time.sleep(0.05)
    return value
