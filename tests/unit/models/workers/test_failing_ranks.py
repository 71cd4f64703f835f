"""An error that some ranks of a group have in an update is raised on all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.models.workers import failing_rank
from tests.unit.models.workers.processes import run_ranks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tensor", "failing"),
    [(1, [1]), pytest.param(1, [0], marks=SLOW), pytest.param(1, [0, 1], marks=SLOW), pytest.param(2, [1], marks=SLOW)],
)
def test_a_failed_loss_of_some_ranks_is_raised_on_all_and_the_group_continues(
    tmp_path: Path, tensor: int, failing: list[int]
) -> None:
    run_ranks(failing_rank, tmp_path, 2, tensor, *failing)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    text = "algorithm.policy_loss x: ValueError: wrong data xxx"
    for rank, result in enumerate(results):
        prefix = "" if rank in failing else f"rank {failing[0]} of 2: "
        assert result["error"].startswith(prefix + text)
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["metrics"]["optimizer_steps"] > 0
