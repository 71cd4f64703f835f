"""The value loss, entropies and log-probs from logits, and the rewards of tokens."""

from __future__ import annotations

from collections.abc import Callable

from quartet.ppo.distributions import entropy, token_log_probs
from quartet.ppo.losses import value_loss
from quartet.ppo.rewards import token_rewards
from tests.parity.losses.batch import Batch, with_gradient
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import openrlhf, verl


def _value_loss(clip: float) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        tokens = float(batch.lengths.sum())
        return with_gradient(
            lambda values: value_loss(values, batch.old_values, batch.returns, clip, tokens).loss, batch.values, batch
        )

    return run


def _distributions(batch: Batch) -> Results:
    return {"entropies": entropy(batch.logits, 1.0), "log_probs": token_log_probs(batch.logits, batch.token_ids, 1.0)}


def _rewards(batch: Batch) -> Results:
    kl = batch.old_log_probs - batch.reference_log_probs
    return {"rewards": token_rewards(batch.scores, kl, batch.lengths, 0.05)}


GROUP = Group(
    "Values, entropies and rewards of tokens",
    "values",
    unique(
        (
            Case(
                "value loss", verl.NAME, "compute_value_loss", _value_loss(0.5), verl.value_loss(0.5), "value_clip 0.5"
            ),
            Case(
                "value loss", openrlhf.NAME, "ValueLoss", _value_loss(0.5), openrlhf.value_loss(0.5), "value_clip 0.5"
            ),
            Case(
                "value loss",
                openrlhf.NAME,
                "ValueLoss",
                _value_loss(0.0),
                openrlhf.value_loss(None),
                "value_clip 0 (off)",
            ),
            Case("entropy and log-probs", verl.NAME, "entropy_from_logits", _distributions, verl.entropies()),
            Case(
                "rewards of tokens",
                verl.NAME,
                "compute_rewards",
                _rewards,
                verl.token_rewards(0.05),
                "kl_coefficient 0.05",
            ),
        )
    ),
)
