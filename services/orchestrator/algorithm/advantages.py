"""What the config makes of scores: treated, then turned into the advantage of every response token."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.config import AlgorithmConfig
from quartet.ppo import estimators, gae, rewards, statistics
from quartet.ppo.gae import Advantages
from quartet.ppo.rewards import RunningMoments


def treat_scores(
    scores: Tensor,
    truncated: Tensor,
    lengths: Tensor,
    algorithm: AlgorithmConfig,
    moments: RunningMoments | None,
    max_response_tokens: int,
) -> Tensor:
    """Scores [sequences] normalised by ``moments``, scaled, clipped; then less what truncation and length cost.

    ``truncated`` bool [sequences]; ``lengths`` response tokens [sequences].
    """
    if moments is not None:
        scores = rewards.normalize_scores(scores, moments.mean, moments.std)
    scores = scores * algorithm.score.scale
    if algorithm.score.clip is not None:
        scores = rewards.clip_scores(scores, algorithm.score.clip)
    truncation = algorithm.truncation
    if truncation.treatment == "penalty":
        scores = rewards.penalize_truncated(scores, truncated, truncation.penalty)
    if truncation.treatment == "scale":
        scores = rewards.scale_truncated(scores, truncated, truncation.scale)
    if algorithm.length_penalty.per_token:
        price = algorithm.length_penalty
        scores = rewards.penalize_length(scores, lengths, price.per_token, price.free_tokens)
    if algorithm.overlong_penalty.buffer_tokens:
        overlong = algorithm.overlong_penalty
        scores = rewards.penalize_overlong(
            scores, lengths, max_response_tokens, overlong.buffer_tokens, overlong.penalty
        )
    return scores


def estimate_advantages(
    scores: Tensor,
    kl: Tensor,
    values: Tensor,
    lengths: Tensor,
    groups: Tensor,
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
) -> Advantages:
    """Advantages [tokens] by the configured estimator, and the value targets [tokens]: 0 where there is no critic.

    ``scores`` [sequences]; ``kl`` and ``values`` [tokens]; ``groups`` [sequences], the prompt of each response.
    """
    if algorithm.estimator in ("gae", "reinforce_plus_plus"):
        token_rewards = rewards.token_rewards(scores, kl, lengths, kl_coefficient)
        if algorithm.whiten_rewards:
            token_rewards = statistics.whiten(token_rewards, shift_mean=False)
        if algorithm.estimator == "gae":
            return gae.generalized_advantages(token_rewards, values, lengths, algorithm.gamma, algorithm.gae_lambda)
        by_token = estimators.discounted_returns(token_rewards, lengths, algorithm.gamma)
        return Advantages(by_token, torch.zeros_like(by_token))
    paid = estimators.sequence_rewards(scores, kl, lengths, kl_coefficient)
    match algorithm.estimator:
        case "reinforce":
            by_response = estimators.reinforce_advantages(paid)
        case "rloo":
            by_response = estimators.rloo_advantages(paid, groups)
        case "grpo":
            by_response = estimators.grpo_advantages(paid, groups, algorithm.grpo_normalize_std)
    by_token = estimators.spread(by_response, lengths)
    return Advantages(by_token, torch.zeros_like(by_token))
