"""The interface of advantage estimators, and the built-in estimators.

A custom estimator is a function ``f(inputs: EstimatorInput) -> Tensor``, or ``-> Advantages`` if it needs a critic. The config
names it, ``algorithm.estimator: my_package.my_module:my_estimator``, and declares its needs in ``algorithm.custom_estimator``.
``quartet.config.estimators`` lists the built-in estimators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from quartet.errors import ComputationFailed, ConfigError
from quartet.ppo import critic_free_advantages as estimators
from quartet.ppo.gae import Advantages, generalized_advantages, length_adaptive_lambda
from quartet.system.user_code import describe


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """Input of an estimator: one step's batch. All tensors are on the CPU and have no gradients.

    Tokens are the policy's own tokens in the responses; observations of an environment between them are left out. ``rewards``:
    float32 [tokens] if the estimator's granularity is "token" (-beta KL at each token, plus the score at the last token of each
    response; with an environment, its rewards are at the last token of each turn); float32 [sequences] if it is "sequence" (the
    score minus beta times the response's KL). ``values``: float32 [tokens], from the critic at generation time; 0 without a
    critic. ``lengths``: int64 [sequences], tokens of each response. ``groups``: int64 [sequences], the prompt of each response.
    ``baselines``: float32 [sequences], the score of a greedy response to the prompt of each response, without a KL; empty without
    needs_greedy_baseline. ``gamma``, ``gae_lambda``, ``value_lambda`` and ``length_adaptive_alpha`` are the settings of these
    names below ``algorithm``. While the values are pretrained, ``value_lambda`` is 1. ``parameters`` are the estimator's own, by
    name: algorithm.estimator_parameters, for a built-in estimator with the defaults of the others.
    """

    rewards: Tensor
    values: Tensor
    lengths: Tensor
    groups: Tensor
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_lambda: float | None = None
    length_adaptive_alpha: float | None = None
    parameters: Mapping[str, bool | float] = field(default_factory=dict)
    baselines: Tensor = field(default_factory=lambda: torch.zeros(0))


Estimator = Callable[[EstimatorInput], Tensor | Advantages]
"""Function that returns advantages in the shape of ``rewards``. With a critic it returns ``Advantages``, which adds value
targets.
"""


def gae(inputs: EstimatorInput) -> Advantages:
    """Generalized advantage estimation (GAE): [tokens] -> both [tokens]. See ``quartet.ppo.gae``.

    The value targets use ``value_lambda``, or ``gae_lambda`` if it is None, also if the advantages use a lambda by length.
    """
    value_lambda = inputs.value_lambda
    policy_lambda: float | Tensor = inputs.gae_lambda
    if inputs.length_adaptive_alpha is not None:
        value_lambda = inputs.gae_lambda if value_lambda is None else value_lambda
        policy_lambda = length_adaptive_lambda(inputs.lengths, inputs.length_adaptive_alpha)
    return generalized_advantages(
        inputs.rewards, inputs.values, inputs.lengths, inputs.gamma, policy_lambda, value_lambda
    )


def reinforce(inputs: EstimatorInput) -> Tensor:
    """REINFORCE with the step's mean reward as the baseline: [sequences] -> [sequences]."""
    return estimators.reinforce_advantages(inputs.rewards)


def rloo(inputs: EstimatorInput) -> Tensor:
    """RLOO, whose baseline is the mean of the prompt's other samples: [sequences] -> [sequences]."""
    return estimators.rloo_advantages(inputs.rewards, inputs.groups)


def grpo(inputs: EstimatorInput) -> Tensor:
    """GRPO, or Dr. GRPO without ``normalize_std``: [sequences] -> [sequences]."""
    chosen = inputs.parameters
    return estimators.grpo_advantages(
        inputs.rewards,
        inputs.groups,
        bool(chosen["normalize_std"]),
        bool(chosen["leave_one_out"]),
        chosen["std_epsilon"],
    )


def opo(inputs: EstimatorInput) -> Tensor:
    """OPO, whose baseline is the mean reward of the prompt's samples, weighted by length: [sequences] -> [sequences]."""
    return estimators.opo_advantages(inputs.rewards, inputs.lengths, inputs.groups)


def reinforce_plus_plus_baseline(inputs: EstimatorInput) -> Tensor:
    """REINFORCE++-baseline, rewards minus the mean of their prompt, to be whitened over the step: [sequences] -> [sequences]."""
    return estimators.group_mean_advantages(inputs.rewards, inputs.groups)


def reinforce_plus_plus(inputs: EstimatorInput) -> Tensor:
    """REINFORCE++, the discounted return from each token on: [tokens] -> [tokens]."""
    return estimators.discounted_returns(inputs.rewards, inputs.lengths, inputs.gamma)


def remax(inputs: EstimatorInput) -> Tensor:
    """ReMax, the discounted return minus the score of the prompt's greedy response: [tokens] -> [tokens]."""
    return estimators.remax_advantages(inputs.rewards, inputs.baselines, inputs.lengths, inputs.gamma)


@torch.no_grad()
def estimate(
    estimator: Estimator,
    inputs: EstimatorInput,
    needs_critic: bool,
    granularity: Literal["token", "sequence"],
    name: str,
) -> Advantages:
    """Return advantages and value targets by ``estimator``, both float32 [tokens]. Value targets are 0 without a critic.

    An advantage per response applies to each of its tokens. Raises ComputationFailed, with ``name`` in the message, if the result
    has another type, shape or dtype than ``Estimator`` requires, or is not finite.
    """
    result = estimator(inputs)
    if not isinstance(result, Advantages if needs_critic else Tensor):
        expected = "quartet.ppo.gae.Advantages, as needs_critic is true" if needs_critic else "a tensor of advantages"
        raise ComputationFailed(f"{name}: returned {type(result).__name__}, expected {expected}")
    if isinstance(result, Advantages):
        advantages, returns = result.advantages, result.returns
    else:
        advantages, returns = result, torch.zeros_like(inputs.values)
    _check(advantages, inputs.rewards, f"{name}: advantages")
    _check(returns, inputs.values, f"{name}: returns")
    if granularity == "sequence":
        advantages = estimators.broadcast_to_tokens(advantages, inputs.lengths)
    return Advantages(advantages, returns)


def check_estimator(
    estimator: Estimator,
    needs_critic: bool,
    granularity: Literal["token", "sequence"],
    min_samples: int,
    name: str,
    parameters: Mapping[str, bool | float],
    needs_greedy_baseline: bool = False,
) -> None:
    """Try an estimator on a few responses, so that a wrong signature or result fails at the start of a run.

    Raises ConfigError, with ``name`` in the message.
    """
    samples = max(2, min_samples)
    lengths = torch.arange(samples) % 8 + 1
    tokens = int(lengths.sum())
    rewards = torch.linspace(-1, 1, tokens if granularity == "token" else samples)
    groups = torch.zeros(samples, dtype=torch.int64)
    inputs = EstimatorInput(
        rewards,
        torch.zeros(tokens),
        lengths,
        groups,
        parameters=parameters,
        baselines=torch.zeros(samples if needs_greedy_baseline else 0),
    )
    try:
        estimate(estimator, inputs, needs_critic, granularity, name)
    except ComputationFailed as error:
        raise ConfigError(f"{error} (in a trial with {samples} responses)") from None
    except Exception as error:  # A user's function may raise anything.
        raise ConfigError(f"{name}: a trial with {samples} responses failed: {describe(error)}") from error


def _check(tensor: Tensor, like: Tensor, name: str) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ComputationFailed(
            f"{name}: {list(tensor.shape)} {tensor.dtype}, expected {list(like.shape)} {like.dtype}"
        )
    infinite = int((~tensor.isfinite()).sum())
    if infinite:
        raise ComputationFailed(f"{name}: {infinite} of {tensor.numel()} are not finite, expected finite numbers")
