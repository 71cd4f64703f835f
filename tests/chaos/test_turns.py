"""Faults during a run with an environment: it ends with the same bits as the undisturbed run."""

from __future__ import annotations

import pytest

from tests.chaos.cases import EVERYTHING, KILL, MINI_BATCHES, PROMPTS_PER_STEP, SEEDS, STOP, Case, Moment
from tests.chaos.runs import ChaosSetup, disturb

TURNS = 2
"""Number of turns of an episode. The word puzzle ends after as many, or when it is solved."""
ENVIRONMENT = "environment"
RESETTING = Moment("resetting", "environment.resetting", per_step=PROMPTS_PER_STEP, nth=5)
STEPPING = Moment(
    "environment-stepping", "environment.stepping", per_step=PROMPTS_PER_STEP * TURNS, nth=PROMPTS_PER_STEP + 3
)
STEPPED = Moment(
    "environment-stepped", "environment.stepped", per_step=PROMPTS_PER_STEP * TURNS, nth=PROMPTS_PER_STEP + 3
)
GENERATING = Moment("generating", "actor.generating")
UPDATING = Moment("stepping", "actor.stepping", per_step=MINI_BATCHES, nth=2)
CASES = (
    Case(ENVIRONMENT, KILL, RESETTING, 0),
    Case(ENVIRONMENT, KILL, STEPPING, 1),
    Case(ENVIRONMENT, KILL, STEPPED, 2),
    Case(ENVIRONMENT, STOP, STEPPING, 0),
    Case(ENVIRONMENT, KILL, UPDATING, 1),
    Case("actor", KILL, STEPPING, 2),
    Case("actor", KILL, GENERATING, 0),
    Case("orchestrator", KILL, STEPPED, 1),
    Case("redis", KILL, STEPPING, 2),
    Case(EVERYTHING, KILL, STEPPED, 0),
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    return ChaosSetup(tmp_path_factory.mktemp("chaos-turns"), turns=TURNS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_disturbed_run_with_turns_is_bit_identical_to_the_undisturbed_one(case: Case, setup: ChaosSetup) -> None:
    assert disturb(case, setup).problems == ()


def test_every_seed_is_disturbed() -> None:
    assert {case.seed for case in CASES} == set(SEEDS)
