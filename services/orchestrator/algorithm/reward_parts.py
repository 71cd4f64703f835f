"""Parts of an ensemble in a step: their weights and missing scores, as metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory

PREFIX, SUFFIX = "reward_", "_weight"


def part_metrics(
    scored: Sequence[ScoredTrajectory], weights: Mapping[str, float], cured_faults: Mapping[str, int]
) -> dict[str, float]:
    """Return the weight of each part, the number of trained responses without a score of it, and its faults that were cured."""
    metrics: dict[str, float] = {}
    for name, weight in weights.items():
        metrics[f"reward_{name}_weight"] = weight
        metrics[f"reward_{name}_missing"] = sum(name not in item.parts for item in scored)
        metrics[f"reward_{name}_cured_faults"] = cured_faults.get(name, 0)
    return metrics


def weights_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of an ensemble's parts in the ``metrics`` of a step, by name; empty for a single source."""
    return {
        name.removeprefix(PREFIX).removesuffix(SUFFIX): value
        for name, value in metrics.items()
        if name.startswith(PREFIX) and name.endswith(SUFFIX)
    }
