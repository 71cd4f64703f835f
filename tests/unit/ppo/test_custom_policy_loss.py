"""A custom policy loss is tried on a few tokens, and each of its results is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.errors import ComputationFailed, ConfigError
from quartet.ppo.losses import PolicyLoss, PolicyLossInput, checked_policy_loss


def result_of(inputs: PolicyLossInput, **changes: Any) -> PolicyLoss:
    loss = -(inputs.log_probs * inputs.advantages * inputs.weights).sum()
    return PolicyLoss(**{"loss": loss, "clipped_tokens": torch.zeros(()), "approx_kl_sum": torch.zeros(()), **changes})


def test_the_trial_has_the_inputs_of_a_possible_micro_batch() -> None:
    seen: list[PolicyLossInput] = []

    def record(inputs: PolicyLossInput) -> PolicyLoss:
        seen.append(inputs)
        return result_of(inputs)

    checked_policy_loss(record, "my:loss", {"tau": 2.0})
    (trial,) = seen
    for log_probs in (trial.log_probs, trial.old_log_probs, trial.rollout_log_probs):
        assert (log_probs < 0).all()
        assert torch.allclose(log_probs, trial.log_probs, atol=0.2)
    assert trial.log_probs.requires_grad
    assert trial.mask.dtype == torch.bool
    assert trial.mask.all()
    assert trial.weights.sum().item() == pytest.approx(1.0)
    assert trial.lengths.tolist() == [2, 1]
    # A loss that treats the two signs in different ways is tried with both.
    assert trial.advantages.sign().tolist() == [1, -1, 1]
    assert trial.parameters == {"tau": 2.0}
    # The defaults of the config for a custom loss.
    assert (trial.clip_low, trial.clip_high, trial.dual_clip, trial.ratio_level) == (0.2, 0.2, 0.0, "token")
    assert all(
        len(part) == 3 for part in (trial.log_probs, trial.old_log_probs, trial.advantages, trial.weights, trial.mask)
    )


@pytest.mark.parametrize("part", ["loss", "clipped_tokens", "approx_kl_sum"])
@pytest.mark.parametrize("value", [1.0, torch.ones(1, requires_grad=True)], ids=["a float", "a vector"])
def test_a_part_that_is_no_scalar_tensor_is_refused(part: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"my:loss: {part} of the result is not a scalar tensor .in a trial"):
        checked_policy_loss(lambda inputs: result_of(inputs, **{part: value}), "my:loss")


def test_later_results_are_checked_too() -> None:
    changes: dict[str, Any] = {}
    loss = checked_policy_loss(lambda inputs: result_of(inputs, **changes), "my:loss")
    inputs = PolicyLossInput(
        log_probs=torch.tensor([-1.0], requires_grad=True),
        old_log_probs=torch.tensor([-1.0]),
        rollout_log_probs=torch.tensor([-1.0]),
        advantages=torch.tensor([1.0]),
        mask=torch.ones(1, dtype=torch.bool),
        weights=torch.ones(1),
        lengths=torch.tensor([1]),
    )
    assert loss(inputs).loss.item() == 1.0
    changes["loss"] = torch.zeros(())
    with pytest.raises(ComputationFailed, match="my:loss: loss has no gradient"):
        loss(inputs)
