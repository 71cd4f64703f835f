"""The table of advantage estimators: the needs of each, and the import path of its function. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Granularity = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """Properties of an advantage estimator that other modules depend on.

    ``function`` is the import path of the function, see ``quartet.ppo.advantages`` for its signature. ``needs_critic``: it reads
    values, so the run has a critic. ``granularity``: it gets one reward per token or one per response, and returns the same
    number of advantages. ``uses_groups``: it compares the samples of one prompt. ``divides_by_group_std``: it divides by the
    standard deviation of a prompt's rewards, unless its parameter ``normalize_std`` is false. ``normalizes_advantages``: the
    default of algorithm.normalize_advantages. ``min_samples``: minimum number of responses, per prompt if it uses groups, else
    per step. ``parameters``: its own parameters with their values, which are true, false, or numbers above 0.
    ``needs_greedy_baseline``: it reads the reward of a greedy response to each prompt, which every step generates for it.
    """

    name: str
    function: str
    needs_critic: bool = False
    granularity: Granularity = "sequence"
    uses_groups: bool = False
    divides_by_group_std: bool = False
    normalizes_advantages: bool = False
    min_samples: int = 1
    parameters: Mapping[str, bool | float] = field(default_factory=dict, hash=False)
    needs_greedy_baseline: bool = False


BUILT_IN_ESTIMATORS: dict[str, EstimatorSpec] = {
    spec.name: spec
    for spec in (
        EstimatorSpec(
            "gae",
            "quartet.ppo.advantages:gae",
            needs_critic=True,
            granularity="token",
            normalizes_advantages=True,
        ),
        EstimatorSpec("reinforce", "quartet.ppo.advantages:reinforce", min_samples=2),
        EstimatorSpec("rloo", "quartet.ppo.advantages:rloo", uses_groups=True, min_samples=2),
        EstimatorSpec(
            "grpo",
            "quartet.ppo.advantages:grpo",
            uses_groups=True,
            divides_by_group_std=True,
            min_samples=2,
            parameters={"normalize_std": True, "leave_one_out": False, "std_epsilon": 1e-4},
        ),
        EstimatorSpec("opo", "quartet.ppo.advantages:opo", uses_groups=True, min_samples=2),
        EstimatorSpec(
            "reinforce_plus_plus",
            "quartet.ppo.advantages:reinforce_plus_plus",
            granularity="token",
            normalizes_advantages=True,
        ),
        EstimatorSpec(
            "reinforce_plus_plus_baseline",
            "quartet.ppo.advantages:reinforce_plus_plus_baseline",
            uses_groups=True,
            normalizes_advantages=True,
            min_samples=2,
        ),
        EstimatorSpec("remax", "quartet.ppo.advantages:remax", granularity="token", needs_greedy_baseline=True),
    )
}
"""The estimators that a config can name without an import path."""
