"""Faults during a run with dynamic sampling: it ends with the same bits as the undisturbed run."""

from __future__ import annotations

import pytest

from tests.chaos.cases import EVERYTHING, KILL, MINI_BATCHES, SEEDS, STEPS, STOP, Case, Moment
from tests.chaos.runs import ChaosSetup, disturb, step_metrics

ROUNDS = 2
"""Rounds of most steps. A step with more rounds only moves the moments of later steps."""
GENERATING = Moment("generating", "actor.generating", per_step=ROUNDS)
NEXT_ROUND = Moment("generating-next-round", "actor.generating", per_step=ROUNDS, nth=2)
APPENDED = Moment("appended-next-round", "actor.appended", per_step=ROUNDS + 1, nth=3)
SCORING = Moment("scoring-next-round", "reward.scoring", per_step=4, nth=4)
SEALED = Moment("sealed", "orchestrator.sealed")
UPDATING = Moment("stepping", "actor.stepping", per_step=MINI_BATCHES, nth=2)
UPDATED = Moment("updated", "orchestrator.updated")
COMMITTED = Moment("committed", "orchestrator.committed")
CASES = (
    Case("orchestrator", KILL, NEXT_ROUND, 0),
    Case("orchestrator", KILL, SCORING, 1),
    Case("orchestrator", KILL, SEALED, 2),
    Case("orchestrator", KILL, UPDATED, 0),
    Case("orchestrator", KILL, COMMITTED, 1),
    Case("orchestrator", STOP, NEXT_ROUND, 2),
    Case("actor", KILL, GENERATING, 0),
    Case("actor", KILL, NEXT_ROUND, 1),
    Case("actor", KILL, UPDATING, 2),
    Case("reward", KILL, SCORING, 0),
    Case("redis", KILL, APPENDED, 1),
    Case(EVERYTHING, KILL, NEXT_ROUND, 2),
    Case(EVERYTHING, KILL, UPDATED, 1),
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    return ChaosSetup(tmp_path_factory.mktemp("chaos-sampling"), dynamic_sampling=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_disturbed_run_is_bit_identical_to_the_undisturbed_one(case: Case, setup: ChaosSetup) -> None:
    assert disturb(case, setup).problems == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_most_steps_of_the_undisturbed_run_have_a_second_round(seed: int, setup: ChaosSetup) -> None:
    rounds = [step["sampling_rounds"] for step in step_metrics(setup.undisturbed(seed))]
    assert sum(number >= ROUNDS for number in rounds) > STEPS // 2


def test_every_seed_is_disturbed() -> None:
    assert {case.seed for case in CASES} == set(SEEDS)
