"""The benchmark of a shared reward service."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.reward_sharing import Latencies, measure, write_model


def test_the_ratio_compares_the_latencies_with_and_without_the_flood() -> None:
    latencies = Latencies([0.1] * 19 + [0.2], [0.15] * 20)
    assert latencies.ratio(0.5) == pytest.approx(1.5)
    assert latencies.quantile(0.95, flooded=False) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("quotas", [True, False])
def test_both_runs_get_scores_from_a_real_service(tmp_path: Path, quotas: bool) -> None:
    options = Namespace(rounds=2, calls=2, sequences=4, in_flight=16, folder=tmp_path)
    model = write_model(tmp_path / "reward")
    reward = {"source": "model", "model": str(model), "micro_batch_tokens": 256}
    latencies, rate = measure(options, model, reward, quotas, "flood")
    rounds = 2 if quotas else 1
    assert (len(latencies.undisturbed), len(latencies.flooded)) == (2 * rounds, 2 * rounds)
    assert rate > 0
