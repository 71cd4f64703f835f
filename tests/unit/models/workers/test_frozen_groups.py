"""Scores and log-probs by groups of processes over gloo, compared with those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.models.workers.workers import SINGLE
from tests.unit.models.workers import frozen_rank
from tests.unit.models.workers.processes import run_ranks

SIZE = 2
TOLERANCE = {"bfloat16": 0.02, "loaded-bfloat16": 0.02, "loaded-reference-bfloat16": 0.05}
"""Largest differences to one process, 1e-5 in float32: the ranks compute the sequences in other micro-batches."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the outputs of two runs of each rank, "RUN-RANK.npz", and with "models"."""
    folder = tmp_path_factory.mktemp("ranks")
    frozen_rank.save_models(folder / "models")
    run_ranks(frozen_rank, folder, SIZE)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The outputs of two runs of each rank, by "RUN-RANK"."""
    return {path.stem: np.load(path) for path in folder.glob("*.npz")}


@pytest.fixture(scope="module")
def single(folder: Path) -> Mapping[str, Any]:
    """The outputs of one process."""
    torch.set_num_threads(1)
    return frozen_rank.outputs(SINGLE, folder / "models")


@pytest.mark.parametrize(
    "case",
    [
        *frozen_rank.SCORERS,
        *frozen_rank.REFERENCES,
        *frozen_rank.LOADED_SCORERS,
        *frozen_rank.LOADED_REFERENCES,
        *frozen_rank.SLICED,
        frozen_rank.ONE_SEQUENCE,
    ],
)
def test_a_group_scores_as_one_process_does(
    results: dict[str, Mapping[str, Any]], single: Mapping[str, Any], case: str
) -> None:
    assert np.abs(results["0-0"][case] - single[case]).max() <= TOLERANCE.get(case, 1e-5)


def test_all_ranks_get_the_same_scores_and_a_second_group_repeats_them(
    results: dict[str, Mapping[str, Any]],
) -> None:
    first = results["0-0"]
    assert len(results) == 2 * SIZE
    for other in results.values():
        assert all(np.array_equal(first[case], other[case]) for case in first if case not in ("held", "read"))


def test_each_rank_holds_its_part_of_a_frozen_model(
    results: dict[str, Mapping[str, Any]], single: Mapping[str, Any]
) -> None:
    held = [results[f"0-{rank}"]["held"] for rank in range(SIZE)]
    assert np.array_equal(sum(held), single["held"])
    assert all(np.all(part <= 0.6 * single["held"]) for part in held)


def test_each_rank_reads_its_part_of_a_frozen_model(
    results: dict[str, Mapping[str, Any]], single: Mapping[str, Any]
) -> None:
    for result in results.values():
        assert np.all(result["read"] <= 0.6 * single["read"])
