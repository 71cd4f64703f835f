"""The types of an update have the same values as the config, which imports no other part."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from quartet.config import policy_losses
from quartet.config.algorithm import AlgorithmConfig
from quartet.config.rollout_correction import RejectionConfig, RolloutCorrectionConfig
from quartet.contract import update


@pytest.mark.parametrize(
    ("ours", "configured"),
    [
        (update.LossAggregation, policy_losses.Aggregation),
        (update.RatioLevel, policy_losses.RatioLevel),
        (update.CorrectionLevel, RolloutCorrectionConfig.model_fields["level"].annotation),
        (update.CorrectionTreatment, RolloutCorrectionConfig.model_fields["treatment"].annotation),
        (update.RejectionStatistic, RejectionConfig.model_fields["statistic"].annotation),
        (
            get_type_hints(update.PolicyLossSettings)["kl_loss"] | None,
            AlgorithmConfig.model_fields["kl_loss"].annotation,
        ),
        (
            get_type_hints(update.PolicyLossSettings)["old_log_probs"],
            AlgorithmConfig.model_fields["old_log_probs"].annotation,
        ),
    ],
    ids=["aggregation", "ratio_level", "level", "treatment", "statistic", "kl_loss", "old_log_probs"],
)
def test_an_update_has_the_choices_of_the_config(ours: Any, configured: Any) -> None:
    assert get_args(ours)
    assert get_args(ours) == get_args(configured)
