"""Advantage estimators and whitening."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.ppo import advantages as estimators
from quartet.ppo.advantages import EstimatorInput
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.entropy import AdaptiveEntropyController
from quartet.ppo.gae import Advantages
from quartet.ppo.rewards import token_rewards
from quartet.ppo.statistics import whiten
from tests.parity.losses.batch import Batch
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import nemo_rl, openrlhf, trl, verl


def _of_responses(name: str, broadcast: bool = True, **settings: Any) -> Callable[[Batch], Results]:
    """Return advantages of an estimator of responses: [tokens], or [sequences] without ``broadcast``."""

    def run(batch: Batch) -> Results:
        parameters = dict(BUILT_IN_ESTIMATORS[name].parameters) | settings
        result = getattr(estimators, name)(_input(batch, batch.scores, parameters=parameters))
        return {"advantages": broadcast_to_tokens(result, batch.lengths) if broadcast else result}

    return run


def _gae(gamma: float, gae_lambda: float, **settings: float) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        result = estimators.gae(_input(batch, batch.token_rewards, gamma=gamma, gae_lambda=gae_lambda, **settings))
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


def _remax(batch: Batch) -> Results:
    rewards = token_rewards(batch.scores, torch.zeros_like(batch.values), batch.lengths, 0.0)
    return {"advantages": estimators.remax(_input(batch, rewards, baselines=batch.greedy_scores))}


def _whitened(name: str, correction: int = 0) -> Callable[[Batch], Results]:
    """Return advantages of responses, whitened over the tokens with the variance that divides by n - ``correction``."""
    plain = _of_responses(name)

    def run(batch: Batch) -> Results:
        advantages = whiten(torch.as_tensor(plain(batch)["advantages"]), shift_mean=True)
        tokens = int(batch.lengths.sum())
        return {"advantages": advantages * math.sqrt((tokens - correction) / tokens)}

    return run


def _entropy_coefficients(batch: Batch) -> Results:
    controller = AdaptiveEntropyController(0.01, 1.0, 0.005, 0.0, 0.02)
    applied = []
    for entropy in ENTROPIES:
        applied.append(controller.value)
        controller.update(entropy)
    return {"coefficients": torch.tensor(applied, dtype=torch.float64)}


def _input(batch: Batch, rewards: Any, **settings: Any) -> EstimatorInput:
    return EstimatorInput(rewards, batch.values, batch.lengths, batch.groups, **settings)


ENTROPIES = (1.5, 0.9, 0.8, 1.0, 0.7, 0.6, 1.2, 1.4, 0.5, 2.0, 3.0, 0.9)
"""Mean entropy of each step, in nats per token, around the target of 1."""
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
                _of_responses("grpo", normalize_std=False),
                verl.outcome("grpo", norm_adv_by_std_in_grpo=False),
                "normalize_std false (Dr. GRPO)",
            ),
            Case(
                "grpo",
                trl.NAME,
                "GRPOTrainer scale_rewards=none",
                _of_responses("grpo", False, normalize_std=False),
                trl.group_advantages("GRPOTrainer", scale_rewards="none"),
                "normalize_std false (Dr. GRPO)",
            ),
            Case(
                "grpo",
                openrlhf.NAME,
                "dr_grpo",
                _of_responses("grpo", normalize_std=False),
                openrlhf.advantages("dr_grpo"),
                "normalize_std false (Dr. GRPO)",
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
            Case(
                "reinforce_plus_plus_baseline",
                openrlhf.NAME,
                "reinforce_baseline",
                _whitened("reinforce_plus_plus_baseline"),
                openrlhf.advantages("reinforce_baseline", normalized=True),
                "",
                NORMALIZED,
                "float32",
            ),
            Case(
                "reinforce_plus_plus_baseline",
                verl.NAME,
                "reinforce_plus_plus_baseline",
                _whitened("reinforce_plus_plus_baseline", correction=1),
                verl.outcome("reinforce_plus_plus_baseline"),
                "",
                "whitened with verl's variance, which divides by n - 1",
            ),
            Case("remax", verl.NAME, "remax", _remax, verl.outcome("remax"), "with scores of greedy responses"),
            Case("opo", verl.NAME, "opo", _of_responses("opo"), verl.outcome("opo")),
            Case(
                "grpo",
                nemo_rl.NAME,
                "use_leave_one_out_baseline",
                _of_responses("grpo", False, leave_one_out=True, std_epsilon=1e-6),
                nemo_rl.leave_one_out(True),
                "leave_one_out, std_epsilon 1e-6",
                transcribed=True,
            ),
            Case(
                "gae",
                nemo_rl.NAME,
                "gae_lambda_value",
                _gae(0.97, 0.9, value_lambda=1.0),
                nemo_rl.gae(0.97, 0.9, gae_lambda_value=1.0),
                "lambda 0.9, value_lambda 1 (VAPO)",
                transcribed=True,
            ),
            Case(
                "gae",
                nemo_rl.NAME,
                "length_adaptive_alpha",
                _gae(0.97, 0.9, value_lambda=1.0, length_adaptive_alpha=0.3),
                nemo_rl.gae(0.97, 0.9, gae_lambda_value=1.0, length_adaptive_alpha=0.3),
                "length_adaptive_alpha 0.3, value_lambda 1 (VAPO)",
                transcribed=True,
            ),
            Case(
                "adaptive entropy",
                trl.NAME,
                "use_adaptive_entropy",
                _entropy_coefficients,
                trl.entropy_controller(
                    ENTROPIES,
                    0.01,
                    entropy_target=1.0,
                    entropy_coef_delta=0.005,
                    entropy_coef_min=0.0,
                    entropy_coef_max=0.02,
                ),
                "target 1, step 0.005, range 0 to 0.02",
            ),
        )
    ),
)
