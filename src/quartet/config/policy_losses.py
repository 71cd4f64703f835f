"""The table of policy losses: the parameters and defaults of each, and the import path of its function. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Aggregation = Literal[
    "token_mean", "sequence_mean", "token_sum", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
RatioLevel = Literal["token", "sequence"]
MAX_PARAMETERS = 32
"""Maximum number of parameters of a policy loss, and of an estimator."""


@dataclass(frozen=True, slots=True)
class LossParameter:
    """A parameter of a policy loss: its default, and the range ``above`` < value <= ``most``."""

    default: float
    above: float = 0.0
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class PolicyLossSpec:
    """Properties of a policy loss that other modules depend on.

    ``function`` is the import path of the function, see ``quartet.ppo.losses`` for its signature. ``clip_low``, ``clip_high`` and
    ``aggregation`` are the defaults of algorithm.clip_ratio, clip_ratio_high and loss_aggregation; a loss that reads no clip
    range has None. ``reads_dual_clip`` and ``reads_ratio_level``: it reads these settings. ``one_advantage_per_response``: all
    tokens of a response must have the same advantage. ``select_tokens`` is the import path of a function that selects tokens of
    each mini-batch from its old log-probs; None if the loss needs none. ``needs_old_log_probs``: the old log-probs of a whole
    mini-batch must be known before its first token is in a loss. For the first mini-batch this takes one more forward pass,
    unless it has only one micro-batch in one process. ``uses_geometric_mean``: the importance weight of a response is the
    geometric mean of its tokens' weights, as its ratio is that of their ratios.
    """

    name: str
    function: str
    parameters: Mapping[str, LossParameter] = field(default_factory=dict)
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    aggregation: Aggregation = "token_mean"
    reads_dual_clip: bool = False
    reads_ratio_level: bool = False
    one_advantage_per_response: bool = False
    select_tokens: str | None = None
    needs_old_log_probs: bool = False
    uses_geometric_mean: bool = False

    def resolve(self, parameters: Mapping[str, float]) -> dict[str, float]:
        """Return all parameters of the loss: ``parameters``, and the defaults of the others.

        Raises ValueError if a name is unknown or a value is out of range.
        """
        for name, value in parameters.items():
            parameter = self.parameters.get(name)
            if parameter is None:
                known = f"its parameters are {', '.join(self.parameters)}" if self.parameters else "it has none"
                raise ValueError(
                    f"policy_loss_parameters.{name}: policy loss {self.name} has no such parameter; {known}"
                )
            if not (math.isfinite(value) and parameter.above < value <= parameter.most):
                most = f" and at most {parameter.most:g}" if math.isfinite(parameter.most) else ""
                above = f"more than {parameter.above:g}" if math.isfinite(parameter.above) else "a finite number"
                raise ValueError(f"policy_loss_parameters.{name} {value:g}: expected {above}{most}")
        result = {name: parameter.default for name, parameter in self.parameters.items()} | dict(parameters)
        if self.name == "clip_cov" and not result["clip_cov_lb"] < result["clip_cov_ub"]:
            raise ValueError(
                f"policy_loss_parameters.clip_cov_lb {result['clip_cov_lb']:g}: expected less than clip_cov_ub "
                f"{result['clip_cov_ub']:g}"
            )
        return result


BUILT_IN_POLICY_LOSSES: dict[str, PolicyLossSpec] = {
    spec.name: spec
    for spec in (
        PolicyLossSpec("clipped", "quartet.ppo.policy_losses:clipped", reads_dual_clip=True, reads_ratio_level=True),
        PolicyLossSpec(
            "gspo",
            "quartet.ppo.policy_losses:gspo",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence_mean",
            reads_dual_clip=True,
            one_advantage_per_response=True,
        ),
        PolicyLossSpec(
            "gspo_token",
            "quartet.ppo.policy_losses:gspo_token",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence_mean",
            reads_dual_clip=True,
        ),
        PolicyLossSpec("cispo", "quartet.ppo.policy_losses:cispo", clip_low=1.0, clip_high=4.0),
        PolicyLossSpec(
            "sapo",
            "quartet.ppo.policy_losses:sapo",
            {"tau_positive": LossParameter(1.0), "tau_negative": LossParameter(1.05)},
            clip_low=None,
            clip_high=None,
            aggregation="sequence_mean",
        ),
        PolicyLossSpec(
            "gmpo",
            "quartet.ppo.policy_losses:gmpo",
            clip_low=0.4,
            clip_high=0.4,
            aggregation="sequence_mean",
            one_advantage_per_response=True,
            uses_geometric_mean=True,
        ),
        PolicyLossSpec(
            "clip_cov",
            "quartet.ppo.policy_losses:clip_cov",
            {
                "clip_cov_ratio": LossParameter(0.0002, most=1.0),
                "clip_cov_lb": LossParameter(1.0, above=-math.inf),
                "clip_cov_ub": LossParameter(5.0, above=-math.inf),
            },
            select_tokens="quartet.ppo.policy_losses:select_clip_cov",
            needs_old_log_probs=True,
        ),
        PolicyLossSpec(
            "kl_cov",
            "quartet.ppo.policy_losses:kl_cov",
            {"kl_cov_ratio": LossParameter(0.0002, most=1.0), "ppo_kl_coef": LossParameter(0.1)},
            clip_low=None,
            clip_high=None,
            # Before the first optimizer step, ratio 1 makes the penalty and its gradient 0, so no selection is needed there.
            select_tokens="quartet.ppo.policy_losses:select_kl_cov",
        ),
        PolicyLossSpec("dppo_tv", "quartet.ppo.policy_losses:dppo_tv", {"ratio_cap": LossParameter(20.0)}),
        PolicyLossSpec(
            "dppo_kl",
            "quartet.ppo.policy_losses:dppo_kl",
            {"ratio_cap": LossParameter(20.0)},
            clip_low=0.05,
            clip_high=0.05,
        ),
    )
}
"""The policy losses that a config can name without an import path."""


def policy_loss_spec(name: str) -> PolicyLossSpec:
    """Return the spec of a built-in loss. A custom loss has the defaults of ``clipped`` and reads all settings."""
    return BUILT_IN_POLICY_LOSSES.get(name) or PolicyLossSpec(name, name, reads_dual_clip=True, reads_ratio_level=True)
