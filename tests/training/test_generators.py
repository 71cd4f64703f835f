"""Runs with generators: their number, their loss and their replacement change no bit. Every trajectory is trained on once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from quartet.contract.status import Role
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import Generators, run_with_generators
from tests.training.runs import Run, assert_same, run_to_completion
from tests.training.test_recovery import run_with_lost_services
from tests.waiting import LIMIT

STEPS = 4
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "rollout": {"samples_per_prompt": 2},
    "recovery": {"backoff_seconds": 0.01},
}


@pytest.fixture(scope="module")
def built_in(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


# The tests below have two.
def test_generators_give_the_same_bits_as_the_engine_of_the_actor(make: MakeConfig, built_in: Run) -> None:
    """The tests below have two."""
    run = run_with_generators(make(**SHORT), 4)
    assert_same(run, built_in)
    assert run.progress.recoveries == 0
    lines = [line for step in range(1, STEPS + 1) for line in run.trajectories(step)]
    assert len({line["generator"] for line in lines}) == 4
    assert len({line["weights_digest"] for line in lines}) == STEPS


def test_generators_that_are_lost_and_replaced_change_nothing(make: MakeConfig, built_in: Run) -> None:
    # The generation of a step has started already when it is prepared. The other generator does the work of the lost one.
    run = run_with_generators(make(**SHORT), 2, lambda running, step: running.replace(running.addresses[step % 2]))
    assert_same(run, built_in)
    ids = Counter(line["id"] for step in range(1, STEPS + 1) for line in run.trajectories(step))
    assert set(ids.values()) == {1}
    assert len(ids) == STEPS * 4 * 2


def test_a_run_recovers_when_all_generators_are_lost(make: MakeConfig, built_in: Run) -> None:
    timers: list[threading.Timer] = []

    def lose_all(running: Generators, step: int) -> None:
        if step == 3 and not timers:
            for address in running.addresses:
                running.lose(address)
                timers.append(threading.Timer(0.3, running.start, [address]))
                timers[-1].start()

    run = run_with_generators(make(**SHORT), 2, lose_all)
    for timer in timers:
        timer.join(LIMIT)
    assert_same(run, built_in)


# One step off-policy, see test_off_policy.py.


@pytest.mark.parametrize("behind", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_run_k_steps_off_policy_has_the_same_bits_with_generators_that_are_lost(
    behind: int, make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "run": {"steps": 7},
        "checkpoint": {"every_steps": 6},
        "recovery": {"backoff_seconds": 0.01},
        "rollout": {"max_off_policy_steps": behind},
    }
    # The engine of the actor generates, and the actor is lost.
    run = run_with_lost_services(make(**changes), {(4, "update"): Role.ACTOR}, monkeypatch)
    lags = [line["off_policy_steps"] for line in run.metrics]
    assert lags == [*range(behind), *[behind] * (6 - behind), 0]

    def replace_one(running: Generators, step: int) -> None:
        if step in (3, 4):
            running.replace(running.addresses[step % 2])

    assert_same(run_with_generators(make(**changes), 2, replace_one), run)
