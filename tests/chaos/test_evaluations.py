"""Faults in the middle of an evaluation beside training: training and evaluations end with the bits of the undisturbed run."""

from __future__ import annotations

import json

import pytest

from tests.chaos.cases import EVERYTHING, KILL, STEPS, Case, Moment
from tests.chaos.runs import ChaosSetup, disturb

GENERATORS = 3
EVALUATES = f"generator-{GENERATORS - 1}"
EVALUATING = Moment("evaluating", "orchestrator.evaluating")
UPDATED = Moment("updated", "orchestrator.updated")
CASES = (
    Case(EVALUATES, KILL, EVALUATING, 0),
    Case("generator-0", KILL, EVALUATING, 1),
    Case("actor", KILL, EVALUATING, 2),
    Case("orchestrator", KILL, EVALUATING, 0),
    Case("reward", KILL, EVALUATING, 1),
    Case(EVERYTHING, KILL, EVALUATING, 2),
    Case("actor", KILL, UPDATED, 0),
    Case("orchestrator", KILL, UPDATED, 1),
    Case(EVERYTHING, KILL, UPDATED, 2),
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    return ChaosSetup(tmp_path_factory.mktemp("chaos-evaluations"), generators=GENERATORS, evaluates=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_run_that_is_disturbed_beside_an_evaluation_is_bit_identical(case: Case, setup: ChaosSetup) -> None:
    lines = (setup.undisturbed(case.seed) / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS + 1))
    assert disturb(case, setup).problems == ()
