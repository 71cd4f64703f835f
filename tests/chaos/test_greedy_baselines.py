"""Faults during a run with greedy baselines: it ends with the same bits as the undisturbed run."""

from __future__ import annotations

import pytest

from tests.chaos.cases import EVERYTHING, KILL, MINI_BATCHES, Case, Moment
from tests.chaos.runs import ChaosSetup, disturb

GENERATING = Moment("generating", "actor.generating")
SCORING = Moment("scoring", "reward.scoring", per_step=4, nth=3)
SEALED = Moment("sealed", "orchestrator.sealed")
UPDATING = Moment("stepping", "actor.stepping", per_step=MINI_BATCHES, nth=2)
COMMITTED = Moment("committed", "orchestrator.committed")
CASES = (
    Case("actor", KILL, GENERATING, 0),
    Case("reward", KILL, SCORING, 0),
    Case("orchestrator", KILL, SEALED, 0),
    Case("actor", KILL, UPDATING, 0),
    Case(EVERYTHING, KILL, COMMITTED, 0),
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    return ChaosSetup(tmp_path_factory.mktemp("chaos-greedy"), greedy_baselines=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_disturbed_run_is_bit_identical_to_the_undisturbed_one(case: Case, setup: ChaosSetup) -> None:
    assert disturb(case, setup).problems == ()
