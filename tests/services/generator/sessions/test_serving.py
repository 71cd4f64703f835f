"""The thread that lets an engine answer users: what a generator that ends does with turns that have begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quartet.errors import Cancelled
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.generator import servicer
from tests.waiting import LIMIT


class Turns:
    """A user always waits."""

    def wait(self, seconds: float) -> bool:
        return True

    def fail(self, error: Exception) -> None:
        """Do nothing."""

    close = fail


class Core:
    """A generator whose engine works on a turn until it is cancelled or, with ``finishes``, until the serving stops."""

    def __init__(self, finishes: bool) -> None:
        self.traffic: Any = self
        self.turns, self.started, self.attested = Turns(), threading.Event(), list[str]()
        self._finishes = finishes

    def serve(self, stops: Callable[[], bool], cancelled: Callable[[], bool]) -> None:
        self.started.set()
        pause = threading.Event()
        while not (self._finishes and stops()):
            if cancelled():
                self.attested.append("cancelled")
                raise Cancelled("cancelled")
            pause.wait(0.01)
        self.attested.append("finished")


@pytest.mark.parametrize(("finishes", "outcome"), [(True, "finished"), (False, "cancelled")])
def test_a_generator_that_ends_finishes_its_turns_or_cancels_them_in_time_to_attest_the_others(
    finishes: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough to finish, and nothing for a turn that takes longer.
    monkeypatch.setattr(servicer, "CLOSE_SECONDS", LIMIT if finishes else 0.0)
    core, compute = Core(finishes), ComputeThread()
    serving = servicer._Serving(core, compute)  # type: ignore[arg-type]
    assert core.started.wait(LIMIT)
    serving.close()
    serving._thread.join(LIMIT)
    compute.close()
    assert not serving._thread.is_alive()
    assert core.attested == [outcome]
