"""The PPO updates on one step's experience, in epochs, mini-batches and micro-batches.

Each mini-batch is one optimizer step, and its loss is weighted over the whole mini-batch. Micro-batches limit the memory and do
not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from quartet.contract.arrays import FloatArray
from quartet.contract.random_streams import selection_order
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.errors import ComputationFailed, QuartetError
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.log_probs import EntropyUse, forward_log_probs
from quartet.models.forward.lora_dropout import dropout, masks_of
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.router_replay import check_routing, replayed_routing
from quartet.models.forward.scoring import forward_values
from quartet.models.training.mini_batches import MetricSums, MiniBatch, MiniBatchIterator, UpdateStats
from quartet.models.training.optimizer import set_learning_rate
from quartet.models.training.policy_weights import MASKED_SUMS, PolicyWeights
from quartet.models.value_head import ValueModel
from quartet.models.workers.workers import SINGLE, Workers
from quartet.ppo.losses import (
    PolicyLoss,
    PolicyLossFunction,
    PolicyLossInput,
    SelectionInput,
    TokenSelector,
    kl_loss,
    value_loss,
    weighted_sum,
)
from quartet.ppo.policy_losses import clipped

RandomOrder = Callable[[int], np.ndarray[Any, np.dtype[np.int64]]]

_POLICY_TOKEN_MEANS = {"clip_fraction": "clipped", "approx_kl": "approx_kl"}


@onednn_linear()
def update_policy(
    model: Any,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    settings: OptimizationSettings,
    loss: PolicyLossSettings,
    max_tokens: int,
    loss_function: PolicyLossFunction = clipped,
    workers: Workers = SINGLE,
    select_tokens: TokenSelector | None = None,
    needs_old_log_probs: bool = False,
    uses_geometric_mean: bool = False,
) -> dict[str, float]:
    """Take the policy's optimizer steps on one step's experience and return their metrics.

    ``loss_function`` is the function that ``loss.policy_loss`` names. ``select_tokens``, ``needs_old_log_probs`` and
    ``uses_geometric_mean`` are as in its ``PolicyLossSpec``. The trainer computes the old log-probs in the micro-batches of the
    first epoch, before the first optimizer step, so the ratio starts at exactly 1. With ``loss.old_log_probs`` "rollout" they are
    those of the experience instead. With dropout of an adapter they get a pass of their own, without dropout. A mini-batch
    without a token under ``actor_mask`` that is not rejected takes no step. The result does not depend on ``max_tokens``, which
    limits a micro-batch, pads included. Except at the first step, the update ends
    at a mini-batch whose mean KL(old || new) over its masked tokens exceeds ``loss.target_kl`` (Spinning Up's target_kl, without
    its factor of 1.5).
    With 0 epochs it only runs one forward pass. The ``workers`` share each mini-batch. All of them return the same metrics, those
    of the whole step.

    Metrics, omitted if nothing was observed: ``policy_loss`` and ``grad_norm`` (before clipping), means over optimizer
    steps; ``clip_fraction`` and ``approx_kl`` (old to new, nats), means over masked tokens of all epochs; ``entropy`` (nats), of
    the old policy, mean over the policy's tokens; ``rollout_mismatch_kl`` (nats), k3 between the engine's log-probs and the
    trainer's old ones, mean over the policy's tokens; ``importance_weight`` and further metrics of the correction, see
    ``quartet.ppo.rollout_correction.importance_metrics``; ``rejected_fraction`` and ``off_policy_masked_fraction``, shares of
    masked tokens; ``learning_rate``; and always ``optimizer_steps`` and ``skipped_steps``. The other means do not include skipped
    steps. If the old log-probs are the engine's, entropy and mismatch are those of the first pass over each mini-batch.

    The routers choose the experts of the experience, if it has any, in every pass.

    Raises InvalidRequest before any computation, and MismatchError for experts that the model does not have. Raises
    ComputationFailed if an old log-prob, loss or gradient is not finite,
    before the step of that mini-batch. Earlier steps are not undone, so the caller must restore a checkpoint. With
    ``settings.skip_non_finite`` that step is skipped instead.
    """
    check_routing(model, experience.batch)
    batches = MiniBatchIterator(model, experience, settings, max_tokens, workers)
    policy = _PolicyExperience(
        model,
        batches,
        experience,
        loss,
        loss_function,
        workers,
        select_tokens,
        needs_old_log_probs,
        uses_geometric_mean,
    )
    stats = UpdateStats()
    if settings.num_epochs == 0:
        policy.recompute(batches.mini_batches(0), settings.skip_non_finite)
    else:
        set_learning_rate(optimizer, settings.learning_rate)
        optimizer.zero_grad(set_to_none=True)
        _take_policy_steps(batches, policy, optimizer, settings, loss, stats, workers)
    return {
        **stats.means(
            per_step={"policy_loss": "policy_loss"}, per_token=_POLICY_TOKEN_MEANS | policy.masked_fractions()
        ),
        **policy.observations(),
        **stats.metrics(settings),
    }


@onednn_linear()
def update_value(
    value_model: ValueModel,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    settings: OptimizationSettings,
    loss: ValueLossSettings,
    max_tokens: int,
    workers: Workers = SINGLE,
) -> dict[str, float]:
    """Take the value model's optimizer steps on one step's experience and return their metrics.

    Every token of the policy counts, regardless of the actor's mask. The old values are those of the experience. The result does
    not depend on ``max_tokens``. With 0 epochs nothing is computed. Metrics, omitted if nothing was observed: ``value_loss`` and
    ``grad_norm`` (before clipping), means over optimizer steps; ``value_clip_fraction``, mean over tokens of all epochs;
    ``learning_rate``; and always ``optimizer_steps`` and ``skipped_steps``. For errors and skipped steps see ``update_policy``.
    """
    batches = MiniBatchIterator(value_model, experience, settings, max_tokens, workers)
    old_values, returns = batches.tensor(experience.values), batches.tensor(experience.returns)
    own, masks = batches.own_tokens(), masks_of(value_model)
    stats = UpdateStats()
    if settings.num_epochs:
        set_learning_rate(optimizer, settings.learning_rate)
        optimizer.zero_grad(set_to_none=True)

    for epoch in range(settings.num_epochs):
        for index, mini_batch in enumerate(batches.mini_batches(epoch)):
            count = mini_batch.policy_tokens
            losses, seen = [], MetricSums()
            key = ("value", settings.seed, batches.step, epoch, index)
            for micro_batch, counts in mini_batch.share:
                with dropout(masks, key, micro_batch):
                    values = workers.forward(partial(forward_values, value_model, micro_batch))
                    token_indices, values = own.select(micro_batch.token_indices, values)
                    result = value_loss(
                        values, old_values[token_indices], returns[token_indices], loss.value_clip, count
                    )
                    # The sum of no values: 0 times a value that is not finite would be NaN.
                    total = result.loss if counts else values[:0].sum()
                    total.backward()  # type: ignore[no-untyped-call]
                losses.append(total)
                if counts:
                    seen.add(value_loss=result.loss, clipped=result.clipped_tokens)
            seen = seen.over(workers, "value_loss", "clipped")
            stats.take_step(optimizer, losses, settings, "value", count, seen, workers)

    return {
        **stats.means(per_step={"value_loss": "value_loss"}, per_token={"value_clip_fraction": "clipped"}),
        **stats.metrics(settings),
    }


def _take_policy_steps(
    batches: MiniBatchIterator,
    policy: _PolicyExperience,
    optimizer: torch.optim.Optimizer,
    settings: OptimizationSettings,
    loss: PolicyLossSettings,
    stats: UpdateStats,
    workers: Workers,
) -> None:
    for epoch in range(settings.num_epochs):
        mini_batches = batches.mini_batches(epoch)
        observed = range(0)
        if epoch == 0:
            observed = policy.observe_old(mini_batches, settings.skip_non_finite)
        counts = [policy.masked_tokens(mini_batch) for mini_batch in mini_batches]
        for index, (mini_batch, count) in enumerate(zip(mini_batches, counts, strict=True)):
            if count == 0:
                continue
            order = partial(selection_order, settings.seed, batches.step, epoch, index)
            key = ("policy", settings.seed, batches.step, epoch, index)
            losses, seen = policy.backward(mini_batch, index in observed, order, key)
            if loss.target_kl and stats.steps and seen["approx_kl"] / count > loss.target_kl:
                optimizer.zero_grad(set_to_none=True)
                return
            stats.take_step(optimizer, losses, settings, "policy", count, seen, workers)
        if epoch == 0:
            policy.exchange_old()


class _PolicyExperience:
    """A step's experience on the policy's device, its old log-probs [response tokens] once known, and the loss.

    ``_observed`` [response tokens] are the trainer's log-probs before the first optimizer step, or at the first pass if the old
    log-probs are the engine's.
    """

    def __init__(
        self,
        model: Any,
        batches: MiniBatchIterator,
        experience: Experience,
        loss: PolicyLossSettings,
        loss_function: PolicyLossFunction,
        workers: Workers,
        select_tokens: TokenSelector | None,
        needs_old_log_probs: bool,
        uses_geometric_mean: bool,
    ) -> None:
        self._workers, self._select_tokens, self._needs_old = workers, select_tokens, needs_old_log_probs
        self._model, self._loss, self._loss_function = model, loss, loss_function
        self._masks = masks_of(model)
        self._actor_mask = experience.actor_mask
        self._advantages = batches.tensor(experience.advantages)
        self._reference, self._rollout = (
            batches.tensor(experience.reference_log_probs),
            batches.tensor(experience.log_probs),
        )
        self._own_tokens = batches.own_tokens()
        mask, lengths = (
            batches.tensor(experience.actor_mask),
            torch.from_numpy(experience.batch.response_lengths.copy()),
        )
        self._weights = PolicyWeights(
            loss, mask, self._rollout, self._advantages, lengths.to(mask.device), uses_geometric_mean
        )
        self._selected = torch.zeros_like(mask, dtype=torch.bool) if select_tokens else None
        self._rollout_log_probs, self._response_mask = experience.log_probs, experience.response_mask
        self._entropy = MetricSums()
        self._observed = torch.full_like(mask, torch.nan)
        # The tokens whose log-prob this rank has observed.
        self._computed = torch.zeros_like(mask, dtype=torch.bool)
        self.knows_old = loss.old_log_probs == "rollout"
        """True if the old log-probs are known before the update: those of the engine."""

    def masked_tokens(self, mini_batch: MiniBatch) -> int:
        """Return the number of tokens of the mini-batch in the policy loss."""
        return int(np.count_nonzero(self._actor_mask[mini_batch.token_indices]))

    def masked_fractions(self) -> dict[str, str]:
        """Return the metrics that are shares of the tokens in the policy loss, with the names of their sums."""
        return self._weights.masked_fractions()

    @property
    def _old(self) -> torch.Tensor:
        """The old log-probs [response tokens]."""
        return self._rollout if self.knows_old else self._observed

    def observe_old(self, mini_batches: list[MiniBatch], skip_non_finite: bool) -> range:
        """Compute the old log-probs that are needed before the first optimizer step, which may be those of the whole step.

        Return the indices of the mini-batches whose own forward pass with gradients provides the log-probs.
        """
        if self.knows_old and self._masks is None:
            return range(len(mini_batches))
        # The first mini-batch with a step is computed at the old weights, so its forward pass also provides the old log-probs,
        # unless the loss or its weights need them before it. A pass with dropout provides neither them nor observations.
        counts = map(self.masked_tokens, mini_batches)
        first = next((index for index, count in enumerate(counts) if count), len(mini_batches))
        if (
            self._masks is not None
            or self._weights.needs_old_log_probs
            or not all(map(self._in_time, mini_batches[first : first + 1]))
        ):
            self.recompute(mini_batches, skip_non_finite)
            self.exchange_old()
            if not self.knows_old:
                self._weights.prepare(self._observed)
            self._actor_mask = self._weights.mask.cpu().numpy()
            return range(0)
        self.recompute(mini_batches[:first] + mini_batches[first + 1 :], skip_non_finite)
        return range(first, first + 1)

    def _in_time(self, mini_batch: MiniBatch) -> bool:
        """Return whether a forward pass at the old weights provides the old log-probs before the loss needs them.

        A loss that needs those of the whole mini-batch gets them in time if it has only one micro-batch, in one process.
        """
        return not self._needs_old or (self._workers.size == 1 and len(mini_batch.share.micro_batches) == 1)

    def recompute(self, mini_batches: list[MiniBatch], skip_non_finite: bool) -> None:
        """Compute the old log-probs and the entropy at the current weights, in the same micro-batches as in training.

        A log-prob that is not finite raises ComputationFailed. With ``skip_non_finite`` it becomes NaN instead, and so does the
        loss of its mini-batch.
        """
        seen = MetricSums()
        with torch.no_grad():
            for micro_batch, counts in (part for mini_batch in mini_batches for part in mini_batch.share):
                with replayed_routing(self._model, micro_batch):
                    log_probs, entropies = self._forward(micro_batch, "report")
                if not counts:
                    continue
                _, own = self._own_tokens.select(micro_batch.token_indices, log_probs)
                seen.add(not_finite=(~own.isfinite()).sum())
                self._remember(micro_batch, torch.where(log_probs.isfinite(), log_probs, torch.nan), entropies)
        seen = seen.over(self._workers, "not_finite")
        if seen["not_finite"] and not skip_non_finite:
            raise ComputationFailed(
                f"policy update: {seen['not_finite']:g} old log-probs are not finite: the weights diverged before this step, "
                "which has not changed them; restore a checkpoint"
            )
        if self._select_tokens is not None:
            self.exchange_old()

    def _select(self, mini_batch: MiniBatch, order: RandomOrder) -> None:
        """Select tokens of the whole mini-batch, if the loss does, from its old log-probs, which must be known."""
        if self._select_tokens is None or self._selected is None:
            return
        token_indices = mini_batch.token_indices[self._actor_mask[mini_batch.token_indices] != 0]
        tokens = torch.from_numpy(token_indices).to(self._observed.device)
        self._selected[tokens] = self._select_tokens(
            SelectionInput(
                self._old[tokens],
                self._advantages[tokens],
                self._loss.parameters,
                lambda count: torch.from_numpy(order(count)),
            )
        )

    def backward(
        self, mini_batch: MiniBatch, observe: bool, order: RandomOrder, key: tuple[object, ...]
    ) -> tuple[list[torch.Tensor], MetricSums]:
        """Add the mini-batch's gradients to the model's. Return the loss [] of each micro-batch of this rank, and metrics of all
        ranks.

        ``observe``: this forward pass provides the trainer's log-probs and the entropy. ``order(n)`` returns a random order of n
        tokens, for a selection. ``key`` identifies the mini-batch, for dropout.
        """
        loss, losses, seen = self._loss, [], MetricSums()
        failure: QuartetError | None = None
        is_first = observe and not self.knows_old
        self._weights.start_mini_batch(
            *(
                torch.from_numpy(values).to(self._observed.device)
                for values in (mini_batch.token_indices, mini_batch.lengths)
            )
        )
        if not is_first:
            self._select(mini_batch, order)
        for micro_batch, counts in mini_batch.share:
            with dropout(self._masks, key, micro_batch), replayed_routing(self._model, micro_batch):
                entropy_use: EntropyUse = "train" if loss.entropy_coefficient else "report" if observe else "none"
                log_probs, entropies = self._forward(micro_batch, entropy_use)
                if counts and observe:
                    self._remember(micro_batch, log_probs.detach(), entropies)
                    if is_first and self._needs_old:
                        self._select(mini_batch, order)
                total: torch.Tensor | None = None
                if counts and failure is None:
                    try:
                        total, result = self._total_loss(micro_batch, log_probs, entropies, seen)
                        seen.add(policy_loss=result.loss, clipped=result.clipped_tokens, approx_kl=result.approx_kl_sum)
                    except QuartetError as error:
                        if self._workers.size == 1:
                            raise
                        # This rank may be the only one with an error, and the others wait for its part of their passes.
                        failure = error
                if total is None:
                    # The sum of no values: 0 times a value that is not finite would be NaN.
                    total = log_probs[:0].sum()
                total.backward()  # type: ignore[no-untyped-call]
            losses.append(total)
        self._workers.raise_on_all(failure)
        return losses, seen.over(self._workers, "policy_loss", "clipped", "approx_kl", *MASKED_SUMS)

    def _total_loss(
        self, micro_batch: MicroBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None, seen: MetricSums
    ) -> tuple[torch.Tensor, PolicyLoss]:
        """Return the loss [] of a micro-batch, and the part of it that is the policy loss. Add masked tokens to ``seen``."""
        loss, token_indices = self._loss, micro_batch.token_indices
        weights = self._weights.of_mean(token_indices)
        old = self._old[token_indices]
        result = self._loss_function(
            PolicyLossInput(
                log_probs=log_probs,
                old_log_probs=old,
                rollout_log_probs=self._rollout[token_indices],
                advantages=self._advantages[token_indices],
                mask=self._weights.mask[token_indices] != 0,
                weights=self._weights.of_loss(token_indices, micro_batch.lengths, old, log_probs, seen),
                lengths=micro_batch.lengths,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                dual_clip=loss.dual_clip,
                ratio_level=loss.ratio_level,
                parameters=loss.parameters,
                selected=None if self._selected is None else self._selected[token_indices],
            )
        )
        total = result.loss
        if loss.entropy_coefficient and entropies is not None:
            total = total - loss.entropy_coefficient * weighted_sum(entropies, weights)
        if loss.kl_loss != "none" and loss.kl_loss_coefficient:
            penalty = kl_loss(log_probs, self._reference[token_indices], weights, loss.kl_loss)
            total = total + loss.kl_loss_coefficient * penalty
        return total, result

    def exchange_old(self) -> None:
        """Get the old log-probs that other ranks have computed. A later epoch splits its mini-batches in another way."""
        if self._workers.size > 1:
            computed = self._workers.sum(self._computed)
            values = self._workers.sum(torch.where(self._computed, self._observed, 0.0)).to(self._observed)
            self._observed = torch.where(computed > 0, values, torch.nan)

    def observations(self) -> dict[str, float]:
        """Return ``entropy``, ``rollout_mismatch_kl`` and metrics of the correction, over the tokens with known log-probs."""
        self.exchange_old()
        results = {}
        entropy = self._entropy.over(self._workers, "entropy", "tokens")
        if entropy["tokens"]:
            results["entropy"] = entropy["entropy"] / entropy["tokens"]
        old, rollout = self._observed.cpu().numpy(), self._rollout_log_probs
        if len(self._response_mask):
            old, rollout = old[self._response_mask], rollout[self._response_mask]
        if np.isfinite(old).any():
            results["rollout_mismatch_kl"] = _mismatch(rollout, old)
        return results | self._weights.metrics(self._observed)

    def _forward(self, micro_batch: MicroBatch, entropy_use: EntropyUse) -> tuple[torch.Tensor, torch.Tensor | None]:
        temperature = self._loss.temperature
        return self._workers.forward(lambda: forward_log_probs(self._model, micro_batch, temperature, entropy_use))

    def _remember(self, micro_batch: MicroBatch, old: torch.Tensor, entropies: torch.Tensor | None) -> None:
        assert entropies is not None
        self._observed[micro_batch.token_indices] = old
        self._computed[micro_batch.token_indices] = True
        _, own = self._own_tokens.select(micro_batch.token_indices, entropies)
        finite = own.isfinite()
        self._entropy.add(entropy=own[finite].sum(), tokens=finite.sum())


def _mismatch(rollout: FloatArray, old: FloatArray) -> float:
    """Return the k3 estimate of KL(engine || trainer) in nats, the mean over the tokens with a known old log-prob."""
    difference = np.clip(old.astype(np.float64) - rollout, -20, 20)
    difference = difference[np.isfinite(difference)]
    return float(np.mean(np.expm1(difference) - difference))
