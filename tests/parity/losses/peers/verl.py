"""Calls of verl's own functions: verl.trainer.ppo.core_algos and rollout_corr_helper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.parity.losses.batch import Batch, with_gradient
from tests.parity.losses.case import Results

NAME = "verl"


def policy_loss(
    mode: str,
    aggregation: str = "token-mean",
    token_level: bool = True,
    order: Tensor | None = None,
    rollout_correction: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Callable[[Batch], Results]:
    """Return the policy loss of ``loss_mode`` and its gradient.

    ``rollout_correction``: settings of ``compute_rollout_correction_and_rejection_mask``, whose weights and mask the loss gets.

    ``settings`` are those of the actor; names that the actor lacks are those of its ``policy_loss``. ``token_level``: with
    advantages that differ within a response. ``order`` replaces a random permutation.
    """

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import ActorConfig, PolicyLossConfig

        own = {name: settings[name] for name in settings if name in PolicyLossConfig.__dataclass_fields__}
        actor = {name: value for name, value in settings.items() if name not in own}
        config = ActorConfig(
            strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**own), **actor
        )
        advantages = batch.token_advantages if token_level else batch.advantages
        mask, weights = batch.padded(batch.mask), None
        if rollout_correction is not None:
            corrected, mask = _corrected(batch, rollout_correction)[:2]
            weights = corrected.batch["rollout_is_weights"]

        def loss(log_probs: Tensor) -> Tensor:
            result: Tensor = get_policy_loss_fn(mode)(
                old_log_prob=batch.padded(batch.old_log_probs),
                log_prob=batch.padded(log_probs),
                advantages=batch.padded(advantages),
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=config,
                rollout_is_weights=weights,
            )[0]
            return result

        with mock.patch.object(
            torch, "randperm", (lambda n: order[order < n]) if order is not None else torch.randperm
        ):
            return with_gradient(loss, batch.log_probs, batch)

    return run


def aggregation(mode: str, mask: Callable[[Batch], Tensor], **settings: Any) -> Callable[[Batch], Results]:
    """Return the aggregate of one number per token, and its gradient: the weights of the tokens."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import agg_loss

        return with_gradient(
            lambda values: agg_loss(batch.padded(values), batch.padded(mask(batch)), mode, **settings),
            batch.values,
            batch,
        )

    return run


def value_loss(clip: float) -> Callable[[Batch], Results]:
    """Return the value loss and its gradient."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import compute_value_loss

        old, returns = batch.padded(batch.old_values), batch.padded(batch.returns)
        return with_gradient(
            lambda values: compute_value_loss(batch.padded(values), returns, old, batch.whole(), clip)[0],
            batch.values,
            batch,
        )

    return run


def kl(kind: str, gradient: bool) -> Callable[[Batch], Results]:
    """Return the KL estimate of each token; with ``gradient``, also that of their sum."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import kl_penalty

        results: dict[str, Tensor | float] = {"estimates": kl_penalty(batch.log_probs, batch.reference_log_probs, kind)}
        if gradient:
            results |= with_gradient(
                lambda log_probs: kl_penalty(log_probs, batch.reference_log_probs, kind).sum(), batch.log_probs, batch
            )
        return results

    return run


def kl_controller(observed: tuple[float, ...], responses: int, **settings: float) -> Callable[[Batch], Results]:
    """Return the coefficient after each observed KL."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import AdaptiveKLController

        controller = AdaptiveKLController(**settings)
        coefficients = []
        for value in observed:
            controller.update(value, responses)
            coefficients.append(float(controller.value))
        return {"coefficients": torch.tensor(coefficients, dtype=torch.float64)}

    return run


def gae(gamma: float, lam: float) -> Callable[[Batch], Results]:
    """Return GAE's value targets, and the advantages before verl whitens them: targets minus values."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return

        values = batch.padded(batch.values)
        _, returns = compute_gae_advantage_return(batch.padded(batch.token_rewards), values, batch.whole(), gamma, lam)
        return {"advantages": batch.flat(returns - values), "returns": batch.flat(returns)}

    return run


def outcome(
    estimator: str,
    result: int = 0,
    token_level: bool = False,
    factor: Callable[[Batch], float] | None = None,
    **settings: Any,
) -> Callable[[Batch], Results]:
    """Return the advantages of an estimator of verl's registry: [tokens].

    A response's score is the reward of its last token; with ``token_level``, rewards are at all tokens. ``result`` is the index
    of the result, 0 for advantages and 1 for returns. ``factor`` is multiplied to them.
    """

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        config = mock.Mock(gamma=settings.get("gamma", 1.0))
        rewards = batch.token_rewards if token_level else _at_last_token(batch)
        arguments: dict[str, Any] = {
            "token_level_rewards": batch.padded(rewards),
            "response_mask": batch.whole(),
            "config": config,
            **{name: value for name, value in settings.items() if name != "gamma"},
        }
        if estimator == "remax":
            arguments["reward_baselines"] = batch.greedy_scores
        elif estimator != "reinforce_plus_plus":
            arguments["index"] = batch.groups.numpy()
        advantages = batch.flat(get_adv_estimator_fn(estimator)(**arguments)[result])
        return {"advantages": advantages * (factor(batch) if factor else 1.0)}

    return run


def correction(metrics: tuple[str, ...] = (), weighted: bool = True, **settings: Any) -> Callable[[Batch], Results]:
    """Return the weights of the correction, 0 outside of the mask that it leaves: [tokens]; and some of its ``metrics``."""

    def run(batch: Batch) -> Results:
        weights, mask, logged = _corrected(batch, settings)
        kept = batch.flat(mask)
        if weighted:
            kept = kept * batch.flat(weights.batch["rollout_is_weights"])
        return {"weights": kept, **{name: logged[f"rollout_corr/{name}"] for name in metrics}}

    return run


def _corrected(batch: Batch, settings: Mapping[str, Any]) -> Any:
    """Return the weights, the mask and the metrics of the correction."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(
        batch.padded(batch.old_log_probs), batch.padded(batch.rollout_log_probs), batch.padded(batch.mask), **settings
    )


def entropies() -> Callable[[Batch], Results]:
    """Return the entropy of each token's distribution, and its log-prob."""

    def run(batch: Batch) -> Results:
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_naive

        return {
            "entropies": entropy_from_logits(batch.logits),
            "log_probs": logprobs_from_logits_naive(batch.logits, batch.token_ids),
        }

    return run


def token_rewards(coefficient: float) -> Callable[[Batch], Results]:
    """Return the rewards of tokens: the score at the last one, minus the KL penalty."""

    def run(batch: Batch) -> Results:
        from verl.trainer.ppo.core_algos import compute_rewards

        return {
            "rewards": compute_rewards(
                _at_last_token(batch), batch.old_log_probs, batch.reference_log_probs, coefficient
            )
        }

    return run


def _at_last_token(batch: Batch) -> Tensor:
    rewards = torch.zeros_like(batch.token_rewards)
    rewards[batch.lengths.cumsum(0) - 1] = batch.scores
    return rewards
