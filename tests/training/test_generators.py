"""Runs with generators: their number, their loss and their replacement change no bit. Every trajectory is trained on once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quartet.config.root import Config
from quartet.contract.status import Role
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import Generators, run_with_generators
from tests.training.runs import Run, assert_same, run_to_completion
from tests.training.test_recovery import run_with_lost_service
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
@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3)), 4])
def test_generators_give_the_same_bits_as_the_engine_of_the_actor(count: int, make: MakeConfig, built_in: Run) -> None:
    run = run_with_generators(make(**SHORT), count)
    assert_same(run, built_in)
    assert run.progress.recoveries == 0
    lines = [line for step in range(1, STEPS + 1) for line in run.trajectories(step)]
    assert len({line["generator"] for line in lines}) == count
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


OFF_POLICY = {
    "run": {"steps": 7},
    "checkpoint": {"every_steps": 6},
    "recovery": {"backoff_seconds": 0.01},
}


@pytest.fixture(scope="module", params=[1, 2, 4])
def off_policy(request: pytest.FixtureRequest, make: MakeConfig) -> tuple[Callable[[], Config], Run]:
    """A factory of configs with generation k steps ahead, and an uninterrupted run."""

    def config() -> Config:
        return make(**OFF_POLICY, rollout={"max_off_policy_steps": request.param})

    run = run_to_completion(config())
    lags = [line["off_policy_steps"] for line in run.metrics]
    assert lags == [*range(request.param), *[request.param] * (6 - request.param), 0]
    return config, run


# One step off-policy, see test_off_policy.py.
@pytest.mark.parametrize("off_policy", [2, 4], indirect=True)
@pytest.mark.parametrize("moment", ["generate", "update", "commit"])
@pytest.mark.sampled(5)
def test_a_run_k_steps_off_policy_survives_the_loss_of_the_actor(
    moment: str, off_policy: tuple[Callable[[], Config], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = off_policy
    assert_same(run_with_lost_service(config(), moment, Role.ACTOR, monkeypatch), run)


def test_generators_k_steps_off_policy_give_the_same_bits(off_policy: tuple[Callable[[], Config], Run]) -> None:
    config, run = off_policy
    assert_same(run_with_generators(config(), 2), run)


def test_a_run_k_steps_off_policy_survives_the_loss_of_a_generator(
    off_policy: tuple[Callable[[], Config], Run],
) -> None:
    config, run = off_policy

    def replace_one(running: Generators, step: int) -> None:
        if step in (3, 4):
            running.replace(running.addresses[step % 2])

    assert_same(run_with_generators(config(), 2, replace_one), run)
