"""The benchmark of worker groups: its table, and the memory that a rank reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharding, sharding_rank
from quartet.models.workers.workers import SINGLE
from tests.unit.models import tiny

MIB = 2**20


def report(parts: int, loading: int, peak: int, seconds: float) -> dict[str, Any]:
    held = dict.fromkeys(("parameters", "gradients"), 400 * MIB // parts)
    return {
        **held,
        "optimizer": 800 * MIB // parts,
        "largest": 80 * MIB // parts,
        "gathered": (parts > 1) * 90 * MIB,
        "loading": loading * MIB,
        "peak": peak * MIB,
        "seconds": [seconds, seconds],
    }


def test_the_table_shows_the_largest_rank_and_what_offload_would_leave_on_a_gpu() -> None:
    results = [
        {"size": 1, "offload": False, "rounds": [[report(1, 410, 2000, 4.0)]] * 3},
        {"size": 2, "offload": False, "rounds": [[report(2, 210, 1100, 2.5), report(2, 205, 1000, 2.5)]] * 3},
        {"size": 2, "offload": True, "rounds": [[report(2, 210, 1100, 2.5), report(2, 205, 1000, 2.5)]] * 3},
    ]
    assert sharding.table(results, "a machine").splitlines() == [
        "a machine. A model of 105M parameters in float32, one CPU thread per rank. MiB of the largest rank, and medians. All "
        "ranks: the sum of the peaks while they load.",
        "",
        "| ranks | parameters | gradients | optimizer | peak, loading | all ranks | peak, updates | updates/s, ratio |",
        "|---|---|---|---|---|---|---|---|",
        "| 1 | 400 | 400 | 800 | 410 | 410 | 2000 | 1.00 |",
        "| 2 | 200 | 200 | 400 | 210 | 415 | 1100 | 1.60 |",
        "| 2, offload | 200 | 200 | 400 | 210 | 415 | 1100 | 1.60 |",
        "",
        "On a GPU, a rank would hold these tensors (computed from the table above, MiB, without activations):",
        "",
        "| ranks | no offload | `offload.optimizer` | `offload.parameters` | gathered during an update |",
        "|---|---|---|---|---|",
        "| 1 | 1600 | 880 | – | 0 |",
        "| 2 | 800 | 440 | 0 | 90 |",
    ]


@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_reports_the_bytes_of_its_tensors(tmp_path: Path, offload: bool) -> None:
    model = tiny.causal("llama", vocab_size=64)
    model.save_pretrained(tmp_path)
    count = sum(parameter.numel() for parameter in model.parameters())
    result = sharding_rank.measure(str(tmp_path), 1, offload, SINGLE)
    assert (result["parameters"], result["gradients"]) == (4 * count, 4 * count)
    # Each parameter also has a count of its steps.
    assert result["optimizer"] == 8 * count + 4 * len(list(model.parameters()))
    assert (result["gathered"], len(result["seconds"])) == (0, 1)
