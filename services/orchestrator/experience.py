"""From scored trajectories to experience: token rewards, advantages, returns; and the figures that describe the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quartet.config import AlgorithmConfig
from quartet.ppo import gae, kl, ragged, rewards, statistics
from quartet.types import Experience, FinishReason, FloatArray, TokenBatch
from services.orchestrator.collector import ScoredTrajectory


@dataclass(frozen=True, slots=True)
class ScoreMoments:
    """Mean and standard deviation by which scores are normalised."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The experience of a step, the KL of each response (nats, [sequences]), and the step's figures by metric name."""

    experience: Experience
    response_kl: FloatArray
    metrics: dict[str, float]


def prepare_step(
    run: str,
    step: int,
    policy_version: int,
    scored: Sequence[ScoredTrajectory],
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
    moments: ScoreMoments,
) -> PreparedStep:
    """Computes token rewards, GAE and whitening of a step's trajectories, which are sorted by id."""
    trajectories = [item.trajectory for item in scored]
    batch = TokenBatch.of(trajectories)
    lengths = torch.from_numpy(batch.response_lengths).long()
    truncated = torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories])
    log_probs = _flat([t.log_probs for t in trajectories])
    reference_log_probs = _flat([item.reference_log_probs for item in scored])
    values = _flat([item.values for item in scored])
    raw_scores = torch.tensor([item.score for item in scored])

    scores = treat_truncated(rewards.normalize_scores(raw_scores, moments.mean, moments.std), truncated, algorithm)
    token_kl = kl.kl_estimate(log_probs, reference_log_probs, algorithm.kl_estimator)
    token_rewards = rewards.token_rewards(scores, token_kl, lengths, kl_coefficient)
    if algorithm.whiten_rewards:
        token_rewards = statistics.whiten(token_rewards, shift_mean=False)
    estimate = gae.generalized_advantages(token_rewards, values, lengths, algorithm.gamma, algorithm.gae_lambda)
    masked = algorithm.truncation.treatment == "mask"
    actor_mask = rewards.mask_truncated(truncated if masked else torch.zeros_like(truncated), lengths)
    advantages = estimate.advantages
    if algorithm.normalize_advantages:
        advantages = statistics.whiten(advantages, shift_mean=True, mask=actor_mask)

    response_kl = ragged.sequence_sum(kl.kl_estimate(log_probs, reference_log_probs, "k1"), lengths)
    metrics = {
        "reward_mean": float(raw_scores.double().mean()),
        "reward_std": float(raw_scores.double().std(correction=0)),
        "kl_mean": float(response_kl.double().mean()),
        "kl_coefficient": kl_coefficient,
        "explained_variance": statistics.explained_variance(values, estimate.returns),
        "advantage_std": float(estimate.advantages.double().std(correction=0)),
        "response_tokens_mean": float(lengths.double().mean()),
        "eos_rate": float((~truncated).double().mean()),
        "repetition": statistics.repetition([t.response_ids for t in trajectories]),
        "prompt_tokens": int(batch.prompt_lengths.sum()),
        "response_tokens": int(batch.response_lengths.sum()),
    }
    experience = Experience(
        run=run,
        step=step,
        policy_version=policy_version,
        ids=tuple(str(t.id) for t in trajectories),
        batch=batch,
        scores=_array(scores),
        log_probs=_array(log_probs),
        reference_log_probs=_array(reference_log_probs),
        values=_array(values),
        advantages=_array(advantages),
        returns=_array(estimate.returns),
        actor_mask=_array(actor_mask),
    )
    return PreparedStep(experience, _array(response_kl), metrics)


def treat_truncated(scores: torch.Tensor, truncated: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Scores [sequences] after the configured treatment of truncated responses, bool [sequences]."""
    treatment = algorithm.truncation
    if treatment.treatment == "penalty":
        return rewards.penalize_truncated(scores, truncated, treatment.penalty)
    if treatment.treatment == "scale":
        return rewards.scale_truncated(scores, truncated, treatment.scale)
    return scores


def score_moments(scored: Sequence[ScoredTrajectory]) -> ScoreMoments:
    """Moments of a step's scores; a step without spread is only shifted."""
    scores = np.array([item.score for item in scored], np.float64)
    return ScoreMoments(float(scores.mean()), float(scores.std()) or 1.0)


def _flat(parts: Sequence[FloatArray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.to(torch.float32).numpy()
