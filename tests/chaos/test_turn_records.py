"""Faults in the middle of long episodes: every turn is generated once, and the run ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.chaos.cases import TURN_PARTS, Case, Part, part_of
from tests.chaos.runs import ChaosSetup, disturb
from tests.chaos.turns import Observer

CASES = [case for part in TURN_PARTS for case in part.cases]


@pytest.fixture(scope="module")
def setup_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Part], ChaosSetup]:
    @cache
    def setup(part: Part) -> ChaosSetup:
        return ChaosSetup(tmp_path_factory.mktemp(f"chaos-{part.name}"), episodes=part.episodes)

    return setup


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_fault_in_the_middle_of_episodes_generates_no_turn_twice(
    case: Case, setup_of: Callable[[Part], ChaosSetup]
) -> None:
    """tests/e2e/test_agent_branches.py kills processes in short episodes."""
    part = part_of(case)
    assert part.episodes is not None
    result = disturb(case, setup_of(part), *Observer(case, part.episodes).steps)
    assert result.problems == (), f"python -m tests.chaos --only {case.name}"
