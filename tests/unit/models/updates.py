"""Random experience and settings for updates, and a reference implementation of the update."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.contract.random_streams import permutation
from quartet.contract.update import (
    Experience,
    OptimizationSettings,
    PolicyLossSettings,
    RejectionRule,
    RolloutCorrection,
)
from quartet.models.forward.scoring import response_log_probs
from quartet.system.user_code import import_callable
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 1, 6, 4, 2, 5, 3], [5, 8, 1, 6, 2, 7, 4]
LOSS = PolicyLossSettings(
    temperature=0.8,
    clip_low=0.1,
    clip_high=0.15,
    dual_clip=1.5,
    entropy_coefficient=0.02,
    kl_loss="k3",
    kl_loss_coefficient=0.1,
)
# Each option by itself, and all together. The cap is within the noise between engine and trainer.
OPTIONS = {
    "sequence_mean": {"aggregation": "sequence_mean"},
    "sequence_ratio": {"ratio_level": "sequence"},
    "importance": {"rollout_correction": RolloutCorrection("token", upper=1.05)},
    "all": {
        "aggregation": "sequence_mean",
        "ratio_level": "sequence",
        "rollout_correction": RolloutCorrection("token", upper=1.05),
    },
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_mask": {"rollout_correction": RolloutCorrection("token", "mask", 0.92, 1.08)},
    "seq_mask": {"rollout_correction": RolloutCorrection("token", "seq_mask", 0.97, 1.03)},
    "sequence": {"rollout_correction": RolloutCorrection("sequence", upper=1.1)},
    "sequence_mask": {"rollout_correction": RolloutCorrection("sequence", "mask", upper=1.05)},
    "geometric_mean": {"rollout_correction": RolloutCorrection("geometric_mean", "mask", 0.97, 1.03)},
    "normalize": {"rollout_correction": RolloutCorrection("token", "mask", 0.9, 1.1, normalize=True)},
    "normalize_sequence": {"rollout_correction": RolloutCorrection("sequence", upper=1.1, normalize=True)},
    "reject_tokens": {
        "rollout_correction": RolloutCorrection("token", upper=1.05, rejection=(RejectionRule("token_k3", 0.005),))
    },
    "reject_responses": {
        "aggregation": "sequence_mean",
        "rollout_correction": RolloutCorrection(
            rejection=(RejectionRule("seq_sum_k2", 0.05), RejectionRule("seq_mean_k1", 1.04))
        ),
    },
    "off_policy_mask": {"rollout_correction": RolloutCorrection("token", upper=2.0, off_policy_mask=0.01)},
    "of_engine": {"old_log_probs": "rollout"},
    "of_engine_with_masks": {
        "old_log_probs": "rollout",
        "rollout_correction": RolloutCorrection(rejection=(RejectionRule("token_k2", 0.01),), off_policy_mask=0.02),
    },
    "all": {
        "aggregation": "sequence_mean",
        "rollout_correction": RolloutCorrection(
            "sequence", "mask", 0.9, 1.1, True, (RejectionRule("seq_max_k3", 0.003),), 0.01
        ),
    },
}
"""Corrections for the difference between engine and trainer, whose bounds are within the noise between the two."""


def with_options(**changes: Any) -> PolicyLossSettings:
    return dataclasses.replace(LOSS, **changes)


WIDE_SELECTION = {"clip_cov_ratio": 0.3, "clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "kl_cov_ratio": 0.3}
"""Parameters with which Clip-Cov and KL-Cov select some of a few tokens."""


def built_in_loss(name: str) -> tuple[PolicyLossSettings, dict[str, Any]]:
    """Return the settings of a built-in policy loss with its defaults, and the options of ``update_policy`` for it."""
    spec = BUILT_IN_POLICY_LOSSES[name]
    changed = {parameter: value for parameter, value in WIDE_SELECTION.items() if parameter in spec.parameters}
    loss = PolicyLossSettings(
        temperature=LOSS.temperature,
        clip_low=spec.clip_low or 0.0,
        clip_high=spec.clip_high or 0.0,
        aggregation=spec.aggregation,
        policy_loss=name,
        parameters=spec.resolve(changed),
    )
    return loss, {
        "loss_function": import_callable(spec.function),
        "select_tokens": import_callable(spec.select_tokens) if spec.select_tokens else None,
        "needs_old_log_probs": spec.needs_old_log_probs,
        "uses_geometric_mean": spec.uses_geometric_mean,
    }


def with_outcome_advantages(data: Experience) -> Experience:
    """Return the experience with one advantage per response, as estimators without a critic return it."""
    advantages = np.random.default_rng(9).standard_normal(len(RESPONSES)).astype(np.float32)
    return dataclasses.replace(data, advantages=np.repeat(advantages, RESPONSES))


def experience(model: Any, seed: int = 0) -> Experience:
    """Return random experience on random sequences. Its log-probs are those of the model plus noise."""
    generator = np.random.default_rng(seed)
    batch, tokens = tiny.batch(PROMPTS, RESPONSES, seed), sum(RESPONSES)

    def noise(scale: float) -> Any:
        return (scale * generator.standard_normal(tokens)).astype(np.float32)

    log_probs = response_log_probs(model, batch, LOSS.temperature, 1000) if model is not None else noise(1)
    return Experience(
        run="r",
        step=3,
        policy_version=3,
        ids=tuple(map(str, range(len(PROMPTS)))),
        batch=batch,
        scores=np.zeros(len(PROMPTS), np.float32),
        log_probs=log_probs + noise(0.1),
        reference_log_probs=log_probs + noise(0.3),
        values=noise(1),
        advantages=noise(1),
        returns=noise(1),
        actor_mask=(generator.random(tokens) < 0.8).astype(np.float32),
    )


def settings(**changes: Any) -> OptimizationSettings:
    return OptimizationSettings(
        **{"num_epochs": 2, "num_mini_batches": 2, "learning_rate": 0.05, "max_grad_norm": 1.0, "seed": 5, **changes}
    )


def sgd(model: Any) -> torch.optim.Optimizer:
    """Return plain gradient descent: differences of weights are proportional to gradients, unlike with Adam."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def largest_difference(a: Any, b: Any) -> float:
    return max(
        (x.double() - y.double()).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


class ReferenceUpdate:
    """Reference implementation of updates: in float64, one sequence at a time, by the formulas."""

    def __init__(
        self, model: Any, data: Experience, optimization: OptimizationSettings, loss: PolicyLossSettings = LOSS
    ) -> None:
        self.model = copy.deepcopy(model).double()
        self.data, self.optimization, self.loss = data, optimization, loss
        self.kl_seen: list[float] = []
        self.sequences = data.batch.sequences()
        bounds = np.cumsum([0, *RESPONSES])
        self.flat = [slice(bounds[i], bounds[i + 1]) for i in range(len(RESPONSES))]

    def of(self, name: str, row: int) -> torch.Tensor:
        return torch.from_numpy(getattr(self.data, name)[self.flat[row]].astype(np.float64))

    def groups(self, epoch: int) -> list[Any]:
        order = permutation(self.optimization.seed, self.data.step, epoch, len(self.sequences))
        return (
            np.array_split(order, self.optimization.num_mini_batches)
            if self.optimization.num_mini_batches > 1
            else [np.sort(order)]
        )

    def distribution(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(self.sequences[row].astype(np.int64))
        first = PROMPTS[row]
        full = torch.log_softmax(self.model(input_ids=ids[None]).logits[0] / LOSS.temperature, -1)[first - 1 : -1]
        return full[torch.arange(len(ids) - first), ids[first:]], -(full.exp() * full).sum(-1)

    def descend(self, loss: torch.Tensor) -> float:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        norm = float(torch.sqrt(sum((g**2).sum() for g in gradients)))  # type: ignore[arg-type]
        scale = min(1.0, self.optimization.max_grad_norm / norm)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= self.optimization.learning_rate * scale * gradient
        return norm

    def token_weights(self, group: Any, old: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        masks = {row: self.kept(row, old) for row in group}
        counts = {row: float(mask.sum()) for row, mask in masks.items()}
        if self.loss.aggregation == "token_mean":
            return {row: mask / sum(counts.values()) for row, mask in masks.items()}
        responses = sum(count > 0 for count in counts.values())
        return {row: mask / max(1.0, counts[row]) / responses for row, mask in masks.items()}

    def surrogate(
        self, row: int, log_probs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the objective at each token, and whether a clip is active."""
        advantage = self.of("advantages", row)
        log_ratio = log_probs - old
        if self.loss.ratio_level == "sequence":
            log_ratio = (log_ratio * mask).sum().expand(len(mask))
        ratio = torch.exp(log_ratio)
        bounded = ratio.clamp(1 - self.loss.clip_low, 1 + self.loss.clip_high)
        objective = torch.minimum(ratio * advantage, bounded * advantage)
        lowest = torch.maximum(objective, self.loss.dual_clip * advantage)
        capped = torch.where(advantage < 0, lowest, objective)
        return capped, (capped != ratio * advantage) & (mask > 0)

    def ratios(self, row: int, old: torch.Tensor, level: str) -> torch.Tensor:
        """Return the ratios of trainer to engine of a response, with those outside of the loss."""
        mask, log_ratio = self.of("actor_mask", row), old - self.of("log_probs", row)
        total = (log_ratio * mask).sum()
        if level == "geometric_mean":
            total = total / mask.sum().clamp(min=1)
        return torch.exp(log_ratio if level == "token" else total.expand(len(mask)))

    def trust(self, row: int, old: torch.Tensor) -> torch.Tensor:
        """Return the importance weights of a response within their bounds."""
        correction = self.loss.rollout_correction
        if correction.level == "none":
            return torch.ones_like(old)
        ratios, upper = self.ratios(row, old, correction.level), correction.upper or torch.inf
        if correction.treatment == "truncate":
            return ratios.clamp(correction.lower, upper)
        bounded = self.ratios(row, old, "geometric_mean") if correction.treatment == "seq_mask" else ratios
        return ratios * ((bounded >= correction.lower) & (bounded <= upper))

    def mean_trust(self, old: list[torch.Tensor]) -> float:
        """Return the mean importance weight of the step."""
        correction = self.loss.rollout_correction
        if not correction.normalize:
            return 1.0
        rows = [(self.trust(row, old[row]), self.of("actor_mask", row) > 0) for row in range(len(old))]
        if correction.level == "token":
            return float(torch.cat([weights[mask] for weights, mask in rows]).mean())
        return float(np.mean([float(weights[0]) for weights, mask in rows if mask.any()]))

    def is_kept(self, row: int, log_probs: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a response that no rule rejects."""
        mask, kept = self.of("actor_mask", row) > 0, torch.ones(len(log_probs), dtype=torch.bool)
        log_ratio = log_probs - self.of("log_probs", row)
        for rule in self.loss.rollout_correction.rejection:
            *unit, kind = rule.statistic.split("_")
            values = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kind]
            if unit[0] == "seq":
                own = values[mask] if mask.any() else torch.zeros(1)
                values = {"sum": own.sum(), "mean": own.mean(), "max": own.max()}[unit[1]].expand(len(values))
            if kind == "k1":
                values = values.exp()
                kept &= values >= (rule.lower or 1 / rule.upper)
            kept &= values <= rule.upper
        return kept

    def kept(self, row: int, old: list[torch.Tensor]) -> torch.Tensor:
        """Return the mask of the loss without rejected tokens."""
        mask = self.of("actor_mask", row)
        return mask if self.loss.old_log_probs == "rollout" else mask * self.is_kept(row, old[row])

    def pass_mask(self, row: int, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens off-policy masking drops at the current policy, and which are rejected there."""
        correction, mask = self.loss.rollout_correction, self.of("actor_mask", row)
        divergence = ((self.of("log_probs", row) - log_probs) * mask).sum() / mask.sum().clamp(min=1)
        is_far = bool(correction.off_policy_mask) and bool(divergence > correction.off_policy_mask)
        dropped = (self.of("advantages", row) < 0) & (mask > 0) & is_far
        rejects = self.loss.old_log_probs == "rollout"
        return dropped, (mask > 0) & ~self.is_kept(row, log_probs) & rejects

    def policy(self) -> dict[str, float]:
        with torch.no_grad():
            initial = [self.distribution(row) for row in range(len(self.sequences))]
        trainer = [log_probs for log_probs, _ in initial]
        from_engine = self.loss.old_log_probs == "rollout"
        old = [self.of("log_probs", row) for row in range(len(trainer))] if from_engine else trainer
        mean_trust = self.mean_trust(old)
        losses, norms, kls, clipped, tokens, dropped, rejected = [], [], 0.0, 0, 0, 0, 0
        for group in (group for epoch in range(self.optimization.num_epochs) for group in self.groups(epoch)):
            weights = self.token_weights(group, old)
            count = int(sum(self.kept(row, old).sum() for row in group))
            if count == 0:
                continue
            total, bonus, penalty = (torch.zeros((), dtype=torch.float64) for _ in range(3))
            step_kl, step_clipped = 0.0, 0
            for row in group:
                log_probs, entropy = self.distribution(row)
                mask = self.kept(row, old)
                objective, is_clipped = self.surrogate(row, log_probs, old[row], mask)
                is_dropped, is_rejected = self.pass_mask(row, log_probs.detach())
                trust = self.trust(row, old[row]) / mean_trust * ~(is_dropped | is_rejected)
                total = total - (objective * weights[row] * trust).sum()
                bonus = bonus + (entropy * weights[row]).sum()
                reference_log_ratio = self.of("reference_log_probs", row) - log_probs
                penalty = penalty + ((reference_log_ratio.exp() - 1 - reference_log_ratio) * weights[row]).sum()
                log_ratio = log_probs - old[row]
                step_kl += ((log_ratio.exp() - 1 - log_ratio) * mask).sum().item()
                step_clipped += int((is_clipped & (trust > 0)).sum())
                dropped, rejected = dropped + int((is_dropped & (mask > 0)).sum()), rejected + int(is_rejected.sum())
            self.kl_seen.append(step_kl / count)
            if self.loss.target_kl and losses and step_kl / count > self.loss.target_kl:
                break
            kls, clipped, tokens = kls + step_kl, clipped + step_clipped, tokens + count
            losses.append(total.item())
            norms.append(
                self.descend(total - self.loss.entropy_coefficient * bonus + self.loss.kl_loss_coefficient * penalty)
            )
        drift = torch.cat(trainer) - torch.from_numpy(self.data.log_probs.astype(np.float64))
        importance = torch.cat([self.trust(row, old[row]) for row in range(len(old))])
        is_counted = torch.from_numpy(self.data.actor_mask) > 0
        result = {
            "policy_loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "entropy": float(torch.cat([entropy for _, entropy in initial]).mean()),
            "approx_kl": kls / tokens,
            "clip_fraction": clipped / tokens,
            "rollout_mismatch_kl": float((drift.exp() - 1 - drift).mean()),
            "importance_weight": float(importance[is_counted].mean()),
            "optimizer_steps": len(losses),
        }
        correction = self.loss.rollout_correction
        if correction.off_policy_mask:
            result["off_policy_masked_fraction"] = dropped / tokens
        if correction.rejection and from_engine:
            result["rejected_fraction"] = rejected / tokens
        elif correction.rejection:
            kept = sum(float(self.kept(row, old).sum()) for row in range(len(old)))
            result["rejected_fraction"] = 1 - kept / int(is_counted.sum())
        return result

    def value(self, clip: float) -> dict[str, float]:
        losses = []
        for epoch in range(self.optimization.num_epochs):
            for group in self.groups(epoch):
                count = sum(RESPONSES[row] for row in group)
                loss = torch.zeros((), dtype=torch.float64)
                for row in group:
                    ids = torch.from_numpy(self.sequences[row].astype(np.int64))
                    hidden = self.model.backbone(input_ids=ids[None]).last_hidden_state[0]
                    values = self.model.head(hidden)[PROMPTS[row] - 1 : -1, 0]
                    before, goal = self.of("values", row), self.of("returns", row)
                    near = before + (values - before).clamp(-clip, clip)
                    loss = loss + 0.5 * torch.maximum((values - goal) ** 2, (near - goal) ** 2).sum() / count
                losses.append(loss.item())
                self.descend(loss)
        return {"value_loss": float(np.mean(losses))}
