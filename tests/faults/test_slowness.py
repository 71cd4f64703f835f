"""A service that computes ten times slower delays a run, which has no recovery and stays bit-identical."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from quartet.contract.status import Role
from quartet.rpc.compute_thread import Caller, ComputeThread, Result
from tests.faults.network import SETTINGS
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, orchestrator

SLOWDOWN = 10


class SlowCompute(ComputeThread):
    """Compute thread that takes ten times as long for all work."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0.0

    def run(self, kind: str, caller: Caller, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Run the work as ``ComputeThread`` does, and keep the thread busy for the extra time."""

        def slowly(cancelled: Callable[[], bool]) -> Result:
            start = time.perf_counter()
            result = work(cancelled)
            extra = (SLOWDOWN - 1) * (time.perf_counter() - start)
            time.sleep(extra)
            self.added += extra
            return result

        return super().run(kind, caller, slowly)


@pytest.mark.parametrize("role", [Role.ACTOR, Role.REWARD])
def test_a_ten_times_slower_service_delays_the_run_and_changes_nothing(
    role: Role, make: MakeConfig, undisturbed: Run
) -> None:
    compute = SlowCompute()
    with fleet(make(**SETTINGS)) as services:
        services.lose(role)
        services.start(role, compute=compute)
        with orchestrator(services.config) as active:
            run = active.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
    assert compute.added > 0.0
