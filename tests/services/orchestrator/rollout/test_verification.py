"""The check of a generator by the log-probs of its first trajectory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet.services.orchestrator.rollout.verification import FirstTrajectories
from tests.buffer.samples import trajectory
from tests.services.orchestrator.fake_services import FakeCall


class Actor:
    """Actor that returns the log-probs of a trajectory, and records the temperatures of its calls."""

    def __init__(self, log_probs: Any) -> None:
        self._log_probs = log_probs
        self.temperatures: list[float] = []

    def versioned_log_probs(self, batch: Any, temperature: float) -> Any:
        self.temperatures.append(temperature)
        call = FakeCall(lambda: (self._log_probs, 0))
        call.complete()
        return call


@pytest.mark.parametrize(("greedy", "temperature"), [(False, 0.5), (True, 1.0)])
def test_greedy_trajectories_are_compared_at_temperature_1(greedy: bool, temperature: float) -> None:
    first = replace(trajectory("run", 1, response=3), generator="host:1")
    actor = Actor(first.log_probs)
    check = FirstTrajectories(actor, 0.5, "float32", lambda: None)  # type: ignore[arg-type]
    assert not check.admit(first, greedy)
    assert list(check.decided()) == [(first, "")]
    assert actor.temperatures == [temperature]
    assert check.admit(first, greedy)
