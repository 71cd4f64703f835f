"""From scored trajectories to experience: token rewards, advantages and returns, with the metrics of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
import torch

from quartet.config.algorithm import AlgorithmConfig
from quartet.contract.arrays import FloatArray, IntArray
from quartet.contract.logged_values import means_of
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory
from quartet.contract.update import Experience
from quartet.ppo import kl, ragged, rewards, statistics
from quartet.ppo.distillation import distillation_advantages
from quartet.ppo.rewards import RunningMoments
from quartet.services.orchestrator.algorithm.advantages import estimate_advantages, score_factor, treat_scores
from quartet.services.orchestrator.algorithm.policy_tokens import PolicyTokens, early_rewards, episode_metrics
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Experience of a step, KL in nats of each episode [episodes] and at each token [response tokens], and metrics by name.

    ``branches`` int32 [episodes]: the number of their sequences in the experience.
    The KL is log π − log π_ref, with log π of ``algorithm.kl_log_probs``. The metrics exclude those of ``response_metrics``.
    """

    experience: Experience
    response_kl: FloatArray
    token_kl: FloatArray
    metrics: dict[str, float]
    branches: IntArray


def prepare_step(
    run: str,
    step: int,
    policy_version: int,
    scored: Sequence[ScoredTrajectory],
    algorithm: AlgorithmConfig,
    moments: RunningMoments | None,
    max_response_tokens: int,
    baselines: Sequence[ScoredTrajectory] = (),
) -> PreparedStep:
    """Compute treated scores, advantages and value targets of a step's trajectories, which are sorted by id.

    All numbers are computed over the policy's own tokens, as if the observations between them were not there. The experience
    holds 0 at observation tokens. It has one sequence for each branch of an episode, with the score of the episode; scores, KL
    and lengths in rewards and metrics are those of episodes. ``moments`` normalise the scores; None leaves them unchanged.
    ``max_response_tokens`` is the limit of overlong penalties. ``baselines`` are the greedy responses, for an estimator that
    needs them. Without scores, their metrics are absent, and the experience has no scores.
    """
    trajectories = [item.trajectory for item in scored]
    batch = TokenBatch.of_policy(trajectories)
    tokens = PolicyTokens(trajectories)
    lengths = tokens.lengths
    truncated = torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories])
    groups = torch.tensor([t.id.prompt for t in trajectories])
    log_probs = tokens.select([t.log_probs for t in trajectories])
    reference_log_probs = tokens.select([item.reference_log_probs for item in scored])
    values = tokens.select([item.values for item in scored])
    policy_log_probs = log_probs
    if algorithm.kl_log_probs == "trainer":
        policy_log_probs = tokens.select([part for item in scored if (part := item.policy_log_probs) is not None])
    # Without scores, rewards are sums without a term.
    raw_scores = torch.tensor([0.0 if item.score is None else item.score for item in scored])

    response_lengths = _longest_branches(trajectories)
    scores = treat_scores(raw_scores, truncated, lengths, response_lengths, algorithm, moments, max_response_tokens)
    penalty = kl.kl_estimate(policy_log_probs, reference_log_probs, algorithm.kl_estimator)
    early = early_rewards(trajectories, score_factor(algorithm, moments), algorithm.branch_credit)
    pretrains = algorithm.pretrains_values(step)
    greedy = _baseline_scores(scored, baselines, algorithm, moments, max_response_tokens) if baselines else None
    reward_coefficient = 0.0 if algorithm.has_kl_loss else algorithm.kl_coefficient
    estimate = estimate_advantages(
        scores, penalty, values, tokens, groups, algorithm, reward_coefficient, early, pretrains, greedy
    )
    masked = algorithm.truncation.treatment == "mask"
    actor_mask = rewards.mask_truncated(truncated if masked else torch.zeros_like(truncated), lengths)
    if algorithm.branch_credit == "last" and algorithm.estimator_spec.granularity == "sequence":
        actor_mask = actor_mask * tokens.is_last.float().repeat_interleave(tokens.branch_lengths)
    advantages = estimate.advantages
    if algorithm.normalizes_advantages:
        advantages = statistics.whiten(advantages, shift_mean=True, mask=actor_mask)
    distillation = algorithm.distillation
    if distillation is not None:
        # After the normalization, which would scale up the noise of a student that has reached its teacher.
        advantages = advantages + distillation_advantages(
            policy_log_probs,
            reference_log_probs,
            tokens.branch_lengths,
            distillation.coefficient,
            distillation.discount,
        )

    token_kl = kl.kl_estimate(policy_log_probs, reference_log_probs, "k1")
    response_kl = ragged.sequence_sum(token_kl, lengths)
    has_scores = scored[0].score is not None
    metrics = {
        **(_score_metrics(scored, raw_scores, scores, lengths) if has_scores else {}),
        "kl_mean": float(response_kl.double().mean()),
        "kl_coefficient": algorithm.kl_coefficient,
        "response_tokens_mean": float(lengths.double().mean()),
        "eos_rate": float((~truncated).double().mean()),
        "prompt_tokens": int(batch.prompt_lengths.sum()),
        "response_tokens": int(lengths.sum()),
        **episode_metrics(trajectories),
    }
    if baselines:
        metrics["baseline_reward_mean"] = fsum(item.score or 0.0 for item in baselines) / len(baselines)
    if has_scores:
        metrics["advantage_std"] = float(estimate.advantages.double().std(correction=0))
    if distillation is not None:
        metrics["teacher_kl"] = float((policy_log_probs.double() - reference_log_probs.double()).mean())
    if algorithm.has_critic:
        metrics["explained_variance"] = statistics.explained_variance(values, estimate.returns)
    experience = Experience(
        run=run,
        step=step,
        policy_version=policy_version,
        ids=tuple(id for t in trajectories for id in t.branch_ids),
        batch=batch,
        scores=_array(scores[tokens.episodes] if has_scores else scores[:0]),
        log_probs=tokens.spread(log_probs),
        reference_log_probs=tokens.spread(reference_log_probs),
        values=tokens.spread(values),
        advantages=tokens.spread(advantages),
        returns=tokens.spread(estimate.returns),
        actor_mask=tokens.spread(actor_mask),
        response_mask=tokens.mask,
    )
    branches = np.array([len(item.branches) for item in trajectories], np.int32)
    return PreparedStep(experience, _array(response_kl), tokens.spread(token_kl), metrics, branches)


def response_metrics(responses: Sequence[IntArray]) -> dict[str, float]:
    """Return repetition and distinct n-gram metrics of responses (ids [policy tokens] each). Diagnostics only."""
    return {
        "repetition": statistics.repetition(responses),
        "distinct_1": statistics.distinct(responses, 1),
        "distinct_2": statistics.distinct(responses, 2),
    }


def _score_metrics(
    scored: Sequence[ScoredTrajectory], raw_scores: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor
) -> dict[str, float]:
    """Return metrics of the raw and the treated scores, both [sequences]."""
    return {
        "reward_mean": float(raw_scores.double().mean()),
        "reward_std": float(raw_scores.double().std(correction=0)),
        **_part_means(scored),
        **means_of([item.logged for item in scored]),
        "score_mean": float(scores.double().mean()),
        "length_reward_correlation": statistics.correlation(lengths.double(), raw_scores.double()),
    }


def _part_means(scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """Return the mean unweighted score of each reward of an ensemble, over the responses that it has scored."""
    names = dict.fromkeys(name for item in scored for name in item.parts)
    return {
        f"reward_{name}_mean": float(
            np.mean([item.parts[name] for item in scored if name in item.parts], dtype=np.float64)
        )
        for name in names
    }


def _longest_branches(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return the response tokens of the longest branch of each trajectory, observations included: int64 [episodes]."""
    return torch.tensor([max(len(branch.response_ids) for branch in item.branches) for item in trajectories])


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.to(torch.float32).numpy()


def _baseline_scores(
    scored: Sequence[ScoredTrajectory],
    baselines: Sequence[ScoredTrajectory],
    algorithm: AlgorithmConfig,
    moments: RunningMoments | None,
    max_response_tokens: int,
) -> torch.Tensor:
    """Return the treated score of the greedy response to the prompt of each of ``scored``: float32 [sequences].

    ``baselines``: one scored greedy response for each prompt. Their scores do not enter the ``moments``.
    """
    trajectories = [item.trajectory for item in baselines]
    scores = treat_scores(
        torch.tensor([0.0 if item.score is None else item.score for item in baselines]),
        torch.tensor([item.finish_reason is FinishReason.LENGTH for item in trajectories]),
        torch.tensor([len(item.policy_ids) for item in trajectories]),
        _longest_branches(trajectories),
        algorithm,
        moments,
        max_response_tokens,
    )
    position = {item.id.prompt: index for index, item in enumerate(trajectories)}
    return scores[torch.tensor([position[item.trajectory.id.prompt] for item in scored])]
