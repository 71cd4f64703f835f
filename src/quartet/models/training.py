"""The PPO updates: one step's experience walked through in epochs, mini-batches and micro-batches.

A mini-batch is one optimizer step, and its loss is divided by its own token count however it is split: micro-batches bound the
memory and change nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quartet.errors import InvalidRequest
from quartet.models.batching import MicroBatch, lay_out, micro_batches
from quartet.models.forward import check_batch, device_of
from quartet.models.optimizer import apply_gradients, set_learning_rate
from quartet.models.scoring import EntropyUse, forward_log_probs, forward_values
from quartet.models.value_head import ValueModel
from quartet.ppo.losses import kl_loss, policy_loss, value_loss
from quartet.random_streams import permutation
from quartet.types import (
    Experience,
    FloatArray,
    OptimizationSettings,
    PolicyLossSettings,
    TokenBatch,
    ValueLossSettings,
)

MiniBatch = list[MicroBatch]


def update_policy(
    model: Any,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    settings: OptimizationSettings,
    loss: PolicyLossSettings,
    max_tokens: int,
) -> dict[str, float]:
    """Takes the policy's optimizer steps on one step's experience and reports on them.

    Old log-probs are the trainer's own, in the micro-batches of epoch one, before the first optimizer step: the ratio starts at 1
    exactly. A mini-batch without a token under ``actor_mask`` takes no step. The result does not depend on ``max_tokens``, which
    bounds a micro-batch, pads included.

    Metrics: ``policy_loss`` and ``grad_norm`` (before clipping), means over optimizer steps; ``clip_fraction`` and ``approx_kl``
    (old to new, nats), means over masked tokens of all epochs; ``entropy`` (nats), mean over response tokens in epoch one;
    ``rollout_mismatch_kl`` (nats), k3 between the engine's log-probs and the old ones, mean over response tokens;
    ``learning_rate``; ``optimizer_steps``.

    Raises InvalidRequest before anything; ComputationFailed at a loss or gradient that is not finite, before that mini-batch's
    step (the steps before it stay: go back to the checkpoint).
    """
    walk = _Walk(model, experience, settings, max_tokens)
    set_learning_rate(optimizer, settings.learning_rate)
    optimizer.zero_grad(set_to_none=True)
    mask, advantages = walk.tensor(experience.actor_mask), walk.tensor(experience.advantages)
    reference = walk.tensor(experience.reference_log_probs)
    old = torch.full_like(mask, torch.nan)
    totals = _Totals()

    for epoch in range(settings.epochs):
        mini_batches = walk.mini_batches(epoch)
        counts = [_masked_tokens(mini_batch, experience.actor_mask) for mini_batch in mini_batches]
        # The first mini-batch to be stepped on is still at the old weights when it is computed: its own forward pass serves.
        first = next((index for index, count in enumerate(counts) if count), None) if epoch == 0 else None
        if epoch == 0:
            _recompute(model, [mb for index, mb in enumerate(mini_batches) if index != first], old, loss.temperature)
        for index, (mini_batch, count) in enumerate(zip(mini_batches, counts, strict=True)):
            if count == 0:
                continue
            losses = []
            for micro_batch in mini_batch:
                places = micro_batch.places
                log_probs, entropies = forward_log_probs(
                    model, micro_batch, loss.temperature, _entropy_use(loss, epoch)
                )
                if index == first:
                    old[places] = log_probs.detach()
                result = policy_loss(
                    log_probs,
                    old[places],
                    advantages[places],
                    mask[places],
                    loss.clip_low,
                    loss.clip_high,
                    loss.dual_clip,
                    count,
                )
                total = result.loss
                if loss.entropy_bonus and entropies is not None:
                    total = total - loss.entropy_bonus * (entropies * mask[places]).sum() / count
                if loss.kl_loss != "none" and loss.kl_loss_coefficient:
                    penalty = kl_loss(log_probs, reference[places], mask[places], loss.kl_loss, count)
                    total = total + loss.kl_loss_coefficient * penalty
                total.backward()  # type: ignore[no-untyped-call]
                losses.append(total)
                totals.add(policy_loss=result.loss, clipped=result.clipped_tokens, approx_kl=result.approx_kl_sum)
                if epoch == 0 and entropies is not None:
                    totals.add(entropy=entropies.sum(), entropy_tokens=torch.tensor(len(micro_batch)))
            totals.step(apply_gradients(optimizer, losses, settings.max_grad_norm, "policy"), count)

    return {
        "policy_loss": totals.per_step("policy_loss"),
        "clip_fraction": totals.per_token("clipped"),
        "approx_kl": totals.per_token("approx_kl"),
        "entropy": totals.sum("entropy") / max(1.0, totals.sum("entropy_tokens")),
        "grad_norm": totals.grad_norm,
        "rollout_mismatch_kl": _mismatch(experience.log_probs, old.cpu().numpy()) if settings.epochs else 0.0,
        "learning_rate": settings.learning_rate,
        "optimizer_steps": float(totals.steps),
    }


def update_value(
    value_model: ValueModel,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    settings: OptimizationSettings,
    loss: ValueLossSettings,
    max_tokens: int,
) -> dict[str, float]:
    """Takes the value model's optimizer steps on one step's experience and reports on them.

    Every response token counts, whatever the actor's mask; the old values are the experience's. Does not depend on
    ``max_tokens``. Metrics: ``value_loss`` and ``grad_norm`` (before clipping), means over optimizer steps;
    ``value_clip_fraction``, mean over tokens of all epochs; ``learning_rate``; ``optimizer_steps``. Raises as ``update_policy``.
    """
    walk = _Walk(value_model, experience, settings, max_tokens)
    set_learning_rate(optimizer, settings.learning_rate)
    optimizer.zero_grad(set_to_none=True)
    old_values, returns = walk.tensor(experience.values), walk.tensor(experience.returns)
    totals = _Totals()

    for epoch in range(settings.epochs):
        for mini_batch in walk.mini_batches(epoch):
            count = sum(map(len, mini_batch))
            losses = []
            for micro_batch in mini_batch:
                values = forward_values(value_model, micro_batch)
                places = micro_batch.places
                result = value_loss(values, old_values[places], returns[places], loss.value_clip, count)
                result.loss.backward()  # type: ignore[no-untyped-call]
                losses.append(result.loss)
                totals.add(value_loss=result.loss, clipped=result.clipped_tokens)
            totals.step(apply_gradients(optimizer, losses, settings.max_grad_norm, "value"), count)

    return {
        "value_loss": totals.per_step("value_loss"),
        "value_clip_fraction": totals.per_token("clipped"),
        "grad_norm": totals.grad_norm,
        "learning_rate": settings.learning_rate,
        "optimizer_steps": float(totals.steps),
    }


class _Walk:
    """The order in which an update sees the sequences: a rule of (seed, step, epoch), checked before anything is computed."""

    def __init__(self, model: Any, experience: Experience, settings: OptimizationSettings, max_tokens: int) -> None:
        sequences = len(experience.batch)
        if settings.epochs < 1:
            raise InvalidRequest(f"epochs {settings.epochs}: expected at least 1")
        if not 1 <= settings.mini_batches <= sequences:
            raise InvalidRequest(
                f"mini_batches {settings.mini_batches}: expected 1 to {sequences}, the number of sequences in the step"
            )
        check_batch(model, experience.batch)
        _check_flat(experience)
        self._batch: TokenBatch = experience.batch
        self._step, self._settings = experience.step, settings
        self._max_tokens, self._device = max_tokens, device_of(model)
        # With one mini-batch the order cannot matter: every epoch is the same, and is laid out once.
        self._whole = [self._mini_batch(np.arange(sequences))] if settings.mini_batches == 1 else None

    def mini_batches(self, epoch: int) -> list[MiniBatch]:
        """The epoch's mini-batches, of near-equal numbers of sequences."""
        if self._whole is not None:
            return self._whole
        order = permutation(self._settings.seed, self._step, epoch, len(self._batch))
        return [self._mini_batch(part) for part in np.array_split(order, self._settings.mini_batches)]

    def tensor(self, values: FloatArray) -> torch.Tensor:
        """A flat array of the experience on the model's device, float32 [response tokens]."""
        return torch.from_numpy(np.array(values, np.float32)).to(self._device)

    def _mini_batch(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> MiniBatch:
        groups = micro_batches(self._batch.lengths[rows], self._max_tokens)
        return [lay_out(self._batch, rows[group].tolist(), self._device) for group in groups]


@dataclass(slots=True)
class _Totals:
    """Sums over an update. The tensors stay on the device until a metric is asked for."""

    steps: int = 0
    tokens: int = 0
    _norms: float = 0.0
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def step(self, norm: float, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self._norms += norm

    def sum(self, name: str) -> float:
        return float(self._sums[name]) if name in self._sums else 0.0

    def per_step(self, name: str) -> float:
        return self.sum(name) / max(1, self.steps)

    def per_token(self, name: str) -> float:
        return self.sum(name) / max(1, self.tokens)

    @property
    def grad_norm(self) -> float:
        return self._norms / max(1, self.steps)


def _entropy_use(loss: PolicyLossSettings, epoch: int) -> EntropyUse:
    if loss.entropy_bonus:
        return "train"
    return "report" if epoch == 0 else "none"


def _recompute(model: Any, mini_batches: list[MiniBatch], old: torch.Tensor, temperature: float) -> None:
    """Fills in the old log-probs of ``mini_batches`` at the present weights, in the shapes in which they will be trained."""
    with torch.no_grad():
        for micro_batch in _flatten(mini_batches):
            old[micro_batch.places] = forward_log_probs(model, micro_batch, temperature)[0]


def _flatten(mini_batches: list[MiniBatch]) -> Iterator[MicroBatch]:
    for mini_batch in mini_batches:
        yield from mini_batch


def _masked_tokens(mini_batch: MiniBatch, actor_mask: FloatArray) -> int:
    return int(sum(np.count_nonzero(actor_mask[micro_batch.places.cpu().numpy()]) for micro_batch in mini_batch))


def _mismatch(rollout: FloatArray, old: FloatArray) -> float:
    """k3 estimate of KL(engine || trainer) in nats, mean over response tokens."""
    difference = np.clip(old.astype(np.float64) - rollout, -20, 20)
    return float(np.mean(np.expm1(difference) - difference))


def _check_flat(experience: Experience) -> None:
    expected = (int(experience.batch.response_lengths.sum()),)
    for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask"):
        shape = getattr(experience, name).shape
        if shape != expected:
            raise InvalidRequest(f"experience {name} {shape}: expected {expected}, one number per response token")
