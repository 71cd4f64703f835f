"""Reward processing and advantages, by the config: from scores to one advantage per response token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.estimators import EstimatorSpec
from quartet.errors import ConfigError
from quartet.ppo import critic_free_advantages as estimators
from quartet.ppo import rewards, statistics
from quartet.ppo.advantages import Estimator, EstimatorInput, check_estimator, estimate
from quartet.ppo.gae import Advantages
from quartet.ppo.rewards import EarlyRewards, RunningMoments
from quartet.services.orchestrator.algorithm.policy_tokens import PolicyTokens
from quartet.system.user_code import NotImportable, import_callable


def treat_scores(
    scores: Tensor,
    truncated: Tensor,
    lengths: Tensor,
    response_lengths: Tensor,
    algorithm: AlgorithmConfig,
    moments: RunningMoments | None,
    max_response_tokens: int,
) -> Tensor:
    """Normalize scores [episodes] by ``moments``, scale and clip them, then apply the penalties for truncation and length.

    ``truncated`` bool [episodes]; ``lengths`` policy tokens [episodes]; ``response_lengths`` response tokens of the longest
    branch, observations included, which is what ``max_response_tokens`` limits.
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
            scores, response_lengths, max_response_tokens, overlong.buffer_tokens, overlong.penalty
        )
    return scores


def score_factor(algorithm: AlgorithmConfig, moments: RunningMoments | None) -> float:
    """Return the factor between a part of a raw score and its share of the treated score, by ``treat_scores``."""
    return algorithm.score.scale / (moments.std if moments is not None else 1.0)


def estimate_advantages(
    scores: Tensor,
    kl: Tensor,
    values: Tensor,
    tokens: PolicyTokens,
    groups: Tensor,
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    early: EarlyRewards | None = None,
    pretrains_values: bool = False,
    baselines: Tensor | None = None,
) -> Advantages:
    """Return advantages and value targets [tokens] by the configured estimator. Value targets are 0 without a critic.

    ``scores`` and ``groups`` [episodes], the prompt of each; ``kl`` and ``values`` [tokens]. All tokens are the policy's own. An
    estimator with one advantage per response sees an episode as one response. One with an advantage per token sees each branch of
    an episode as a response, with the score by ``algorithm.branch_credit``. ``early``: the part of the scores that belongs to
    other turns than the last one, by branch. ``pretrains_values``: the value targets are returns without values, of lambda 1.
    ``baselines`` [episodes], for an estimator that needs them.
    """
    spec, lengths = algorithm.estimator_spec, tokens.lengths
    if spec.granularity == "token":
        lengths, groups = tokens.branch_lengths, groups[tokens.episodes]
        if baselines is not None:
            baselines = baselines[tokens.episodes]
        scores = scores[tokens.episodes]
        if algorithm.branch_credit == "last":
            scores = torch.where(tokens.is_last, scores, 0.0)
        step_rewards = rewards.token_rewards(scores, kl, lengths, kl_coefficient, early)
        if algorithm.whiten_rewards:
            step_rewards = statistics.whiten(step_rewards, shift_mean=False)
    else:
        step_rewards = estimators.sequence_rewards(scores, kl, lengths, kl_coefficient)
    inputs = EstimatorInput(
        step_rewards,
        values,
        lengths,
        groups,
        algorithm.gamma,
        algorithm.gae_lambda,
        1.0 if pretrains_values else algorithm.value_lambda,
        algorithm.length_adaptive_alpha,
        parameters=spec.parameters,
    )
    if baselines is not None:
        inputs = replace(inputs, baselines=baselines)
    name = f"algorithm.estimator {spec.name}"
    return estimate(import_estimator(spec), inputs, spec.needs_critic, spec.granularity, name)


@cache
def import_estimator(spec: EstimatorSpec) -> Estimator:
    """Import an estimator's function and try it on a few responses. Raises ConfigError."""
    name = f"algorithm.estimator {spec.name}"
    try:
        function = import_callable(spec.function)
    except NotImportable as error:
        raise ConfigError(f"{name}: {error}") from None
    check_estimator(
        function,
        spec.needs_critic,
        spec.granularity,
        spec.min_samples,
        name,
        spec.parameters,
        spec.needs_greedy_baseline,
    )
    return function
