"""Advantage estimators and whitening."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quartet.ppo import advantages as estimators
from quartet.ppo.advantages import EstimatorInput
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.gae import Advantages
from quartet.ppo.rewards import token_rewards
from quartet.ppo.statistics import whiten
from tests.parity.losses.batch import Batch
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import openrlhf, trl, verl


def _of_responses(name: str, broadcast: bool = True, **settings: Any) -> Callable[[Batch], Results]:
    """Return advantages of an estimator of responses: [tokens], or [sequences] without ``broadcast``."""

    def run(batch: Batch) -> Results:
        result = getattr(estimators, name)(_input(batch, batch.scores, **settings))
        return {"advantages": broadcast_to_tokens(result, batch.lengths) if broadcast else result}

    return run


def _gae(gamma: float, gae_lambda: float) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        result = estimators.gae(_input(batch, batch.token_rewards, gamma=gamma, gae_lambda=gae_lambda))
        return {"advantages": result.advantages, "returns": result.returns}

    return run


def _with_scores(
    name: str, whitened: bool = False, kl_coefficient: float = 0.05, **settings: float
) -> Callable[[Batch], Results]:
    """Return advantages from rewards of tokens: the score at the last token, and a KL penalty at every token."""

    def run(batch: Batch) -> Results:
        kl = batch.old_log_probs - batch.reference_log_probs
        rewards = token_rewards(batch.scores, kl, batch.lengths, kl_coefficient)
        result = getattr(estimators, name)(_input(batch, rewards, **settings))
        returns = {"returns": result.returns} if isinstance(result, Advantages) else {}
        advantages = result.advantages if isinstance(result, Advantages) else result
        return {"advantages": whiten(advantages, shift_mean=True) if whitened else advantages, **returns}

    return run


def _discounted(gamma: float) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        return {"advantages": estimators.reinforce_plus_plus(_input(batch, batch.token_rewards, gamma=gamma))}

    return run


def _input(batch: Batch, rewards: Any, **settings: Any) -> EstimatorInput:
    return EstimatorInput(rewards, batch.values, batch.lengths, batch.groups, **settings)


NORMALIZED = "whitened on both sides"
GROUP = Group(
    "Advantage estimators",
    "estimators",
    unique(
        (
            Case(
                "gae",
                verl.NAME,
                "gae",
                _gae(0.97, 0.9),
                verl.gae(0.97, 0.9),
                "gamma 0.97, lambda 0.9",
                "before whitening",
            ),
            Case(
                "gae",
                openrlhf.NAME,
                "gae",
                _with_scores("gae", whitened=True, gamma=0.97, gae_lambda=0.9),
                openrlhf.advantages("gae", 0.05, normalized=True, gamma=0.97, lambd=0.9),
                "gamma 0.97, lambda 0.9, KL 0.05",
                NORMALIZED,
                "float32",
            ),
            Case(
                "reinforce",
                openrlhf.NAME,
                "flash_reinforce",
                _of_responses("reinforce"),
                openrlhf.advantages("flash_reinforce"),
            ),
            Case("rloo", verl.NAME, "rloo", _of_responses("rloo"), verl.outcome("rloo")),
            Case("rloo", openrlhf.NAME, "rloo", _of_responses("rloo"), openrlhf.advantages("rloo")),
            Case("rloo", trl.NAME, "RLOOTrainer", _of_responses("rloo", False), trl.group_advantages("RLOOTrainer")),
            Case("grpo", verl.NAME, "grpo", _of_responses("grpo"), verl.outcome("grpo", epsilon=1e-4), "epsilon 1e-4"),
            Case("grpo", trl.NAME, "GRPOTrainer", _of_responses("grpo", False), trl.group_advantages("GRPOTrainer")),
            Case(
                "grpo",
                verl.NAME,
                "grpo",
                _of_responses("grpo", divide_by_std=False),
                verl.outcome("grpo", norm_adv_by_std_in_grpo=False),
                "grpo_normalize_std false (Dr. GRPO)",
            ),
            Case(
                "grpo",
                trl.NAME,
                "GRPOTrainer scale_rewards=none",
                _of_responses("grpo", False, divide_by_std=False),
                trl.group_advantages("GRPOTrainer", scale_rewards="none"),
                "grpo_normalize_std false (Dr. GRPO)",
            ),
            Case(
                "grpo",
                openrlhf.NAME,
                "dr_grpo",
                _of_responses("grpo", divide_by_std=False),
                openrlhf.advantages("dr_grpo"),
                "grpo_normalize_std false (Dr. GRPO)",
            ),
            Case(
                "reinforce_plus_plus",
                verl.NAME,
                "reinforce_plus_plus",
                _discounted(0.97),
                verl.outcome("reinforce_plus_plus", result=1, token_level=True, gamma=0.97),
                "gamma 0.97",
                "before whitening",
            ),
            Case(
                "reinforce_plus_plus",
                openrlhf.NAME,
                "reinforce",
                _with_scores("reinforce_plus_plus", whitened=True),
                openrlhf.advantages("reinforce", 0.05, normalized=True),
                "KL 0.05",
                NORMALIZED,
                "float32",
            ),
        )
    ),
)
