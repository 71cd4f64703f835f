"""The same update by Quartet's own functions on TRL's rollouts: scoring, experience, losses, optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from quartet.config.root import Config
from quartet.contract import random_streams
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory, TrajectoryId
from quartet.contract.update import Experience
from quartet.models.forward.scoring import response_log_probs, response_values, sequence_scores
from quartet.models.training import mini_batches
from quartet.models.training import updates as training
from quartet.models.training.optimizer import create_optimizer
from quartet.models.weights.loading import load_causal_lm, load_critic, load_reward_model
from quartet.ppo.kl import kl_estimate
from quartet.ppo.losses import PolicyLoss, PolicyLossInput
from quartet.ppo.policy_losses import clipped
from quartet.services.orchestrator.algorithm.experience import prepare_step
from quartet.services.orchestrator.algorithm.update_request import optimization_at, policy_loss_of, value_loss_of
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory
from tests.parity.checkpoints import ScenarioModels
from tests.parity.comparison import Number, Weights
from tests.parity.rollouts import Rollouts
from tests.parity.scenarios import STEP


@dataclass(frozen=True, slots=True)
class QuartetUpdate:
    """``metrics`` under Quartet's names; weights before and after the update, under TRL's parameter names."""

    metrics: dict[str, Number]
    policy_before: Weights
    policy: Weights
    critic_before: Weights = field(default_factory=dict)
    critic: Weights = field(default_factory=dict)


def run(models: ScenarioModels, rollouts: Rollouts, config: Config, same_order: bool = False) -> QuartetUpdate:
    """Score the rollouts, prepare the step, and apply both updates with the settings in ``config``.

    ``same_order``: every epoch has the order of the first one.
    """
    with_critic = config.algorithm.has_critic
    batch = TokenBatch.of(_trajectories(rollouts))
    policy, max_tokens = load_causal_lm(models.policy), config.actor.micro_batch_tokens
    temperature = config.rollout.temperature
    reference = response_log_probs(load_causal_lm(models.reference), batch, temperature, max_tokens)
    scores = sequence_scores(load_reward_model(models.reward), batch, max_tokens)
    critic = load_critic(models.critic) if with_critic else None
    values = response_values(critic, batch, max_tokens) if critic else np.zeros_like(reference)
    ends = np.cumsum(rollouts.lengths)[:-1]
    scored = [
        ScoredTrajectory(trajectory, float(score), reference_part, values_part)
        for trajectory, score, reference_part, values_part in zip(
            _trajectories(rollouts), scores, np.split(reference, ends), np.split(values, ends), strict=True
        )
    ]
    prepared = prepare_step(
        config.run.name,
        STEP,
        0,
        scored,
        config.algorithm,
        None,
        config.rollout.max_response_tokens,
    )
    experience = prepared.experience
    metrics: dict[str, Number] = {
        "log_probs": response_log_probs(policy, batch, temperature, max_tokens),
        "reference_log_probs": reference,
        "scores": experience.scores,
        "advantages": experience.advantages,
        "kl_mean": prepared.metrics["kl_mean"],
    }
    policy_before = _weights(policy)
    reported, k2 = _update_policy(policy, experience, config, same_order)
    metrics |= {name: reported[name] for name in ("policy_loss", "clip_fraction", "entropy", "grad_norm")}
    metrics["approx_kl"] = k2
    if critic is None:
        return QuartetUpdate(metrics, policy_before, _weights(policy))

    critic_before = _weights(critic)
    metrics |= {"values": values, "returns": experience.returns}
    metrics |= _update_value(critic, experience, config)
    return QuartetUpdate(metrics, policy_before, _weights(policy), critic_before, _weights(critic))


def _trajectories(rollouts: Rollouts) -> list[Trajectory]:
    ends = np.cumsum(rollouts.lengths)[:-1]
    return [
        Trajectory.of_response(
            TrajectoryId("parity", STEP, rollouts.prompt_index[index], index),
            0,
            rollouts.prompts[index],
            rollouts.responses[index],
            log_probs,
            FinishReason.LENGTH if rollouts.truncated[index] else FinishReason.EOS,
        )
        for index, log_probs in enumerate(np.split(rollouts.log_probs, ends))
    ]


def _update_policy(
    policy: Any, experience: Experience, config: Config, same_order: bool
) -> tuple[dict[str, float], float]:
    """Update the policy. Return the metrics, and the k2 estimate of KL(old || new) in nats per token.

    TRL logs k2 as the approximate KL; Quartet reports k3.
    """
    sums = {"kl": 0.0, "tokens": 0}

    def recorded(inputs: PolicyLossInput) -> PolicyLoss:
        sums["kl"] += kl_estimate(inputs.log_probs.detach(), inputs.old_log_probs, "k2").double().sum().item()
        sums["tokens"] += len(inputs.log_probs)
        return clipped(inputs)

    with contextlib.ExitStack() as stack:
        if same_order:
            stack.enter_context(_first_order())
        metrics = training.update_policy(
            policy,
            _optimizer(policy, config.actor),
            experience,
            optimization_at(config, config.actor, STEP),
            policy_loss_of(config.algorithm, config.rollout),
            config.actor.micro_batch_tokens,
            recorded,
        )
    return metrics, sums["kl"] / sums["tokens"]


@contextlib.contextmanager
def _first_order() -> Iterator[None]:
    def permutation(seed: int, step: int, epoch: int, n: int) -> Any:
        return random_streams.permutation(seed, step, 0, n)

    with mock.patch.object(mini_batches, "permutation", permutation):
        yield


def _update_value(critic: Any, experience: Experience, config: Config) -> dict[str, Number]:
    metrics = training.update_value(
        critic,
        _optimizer(critic, config.critic),
        experience,
        optimization_at(config, config.critic, STEP),
        value_loss_of(config.algorithm),
        config.critic.micro_batch_tokens,
    )
    return {name: metrics[name] for name in ("value_loss", "value_clip_fraction")}


def _optimizer(model: Any, trained: Any) -> torch.optim.Optimizer:
    settings = trained.optimizer
    return create_optimizer(model, trained.learning_rate, settings.betas, settings.eps, settings.weight_decay)


def _weights(model: Any) -> Weights:
    """Return copies of the parameters; for a value model, under the names of the classifier that it was loaded from."""
    names = {"backbone.": "model.", "head.": "score."} if hasattr(model, "backbone") else {}
    results = {}
    for name, value in model.named_parameters():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        results[names.get(prefix, "") + name.removeprefix(prefix)] = value.detach().clone()
    return results
