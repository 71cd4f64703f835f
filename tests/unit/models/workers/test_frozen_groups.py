"""Scores and log-probs by groups of processes over gloo, compared with those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from quartet.models.workers.workers import SINGLE
from tests.unit.models.workers import frozen_rank
from tests.unit.models.workers.processes import run_ranks

SIZE = 2
TOLERANCE = {"bfloat16": 0.02}
"""Largest differences to one process, 1e-5 in float32: the ranks compute the sequences in other micro-batches."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mapping[str, Any]]:
    """The outputs of two runs of each rank, by "RUN-RANK"."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(frozen_rank, folder, SIZE)
    return {path.stem: np.load(path) for path in folder.iterdir()}


@pytest.mark.parametrize("case", [*frozen_rank.SCORERS, *frozen_rank.REFERENCES, frozen_rank.ONE_SEQUENCE])
def test_a_group_scores_as_one_process_does(results: dict[str, Mapping[str, Any]], case: str) -> None:
    torch.set_num_threads(1)
    expected = frozen_rank.outputs(SINGLE)[case]
    assert np.abs(results["0-0"][case] - expected).max() <= TOLERANCE.get(case, 1e-5)


def test_all_ranks_get_the_same_scores_and_a_second_group_repeats_them(
    results: dict[str, Mapping[str, Any]],
) -> None:
    first = results["0-0"]
    assert len(results) == 2 * SIZE
    for other in results.values():
        assert all(np.array_equal(first[case], other[case]) for case in first if case != "held")


def test_each_rank_holds_its_part_of_a_frozen_model(results: dict[str, Mapping[str, Any]]) -> None:
    whole = frozen_rank.outputs(SINGLE)["held"]
    held = [results[f"0-{rank}"]["held"] for rank in range(SIZE)]
    assert np.array_equal(sum(held), whole)
    assert all(np.all(part <= 0.6 * whole) for part in held)
