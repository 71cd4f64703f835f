"""TRL's own code on the batch: the loss of its trainers, and the parts of their rollout that compute advantages and ratios."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.parity.losses.batch import SAMPLES, Batch, with_gradient
from tests.parity.losses.case import Results

NAME = "TRL"


class _Accelerator:
    """The accelerator of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def grpo_loss(
    trainer: str = "GRPOTrainer", advantages: str = "advantages", ratio: bool = False, **settings: Any
) -> Callable[[Batch], Results]:
    """Return the loss of GRPOTrainer or a trainer derived from it, and its gradient.

    ``advantages`` is a field of the batch, or "zero". ``settings`` are fields of the trainer's config. With ``ratio``, the loss
    is multiplied by the ratio of trainer and engine, which TRL computes before the update.
    """

    def run(batch: Batch) -> Results:
        owner = _trainer(trainer)
        given = torch.zeros_like(batch.advantages) if advantages == "zero" else getattr(batch, advantages)
        inputs = _inputs(batch) | {
            "advantages": batch.padded(given),
            "old_per_token_logps": batch.padded(batch.old_log_probs),
            "sampling_per_token_logps": batch.padded(batch.rollout_log_probs),
            "ref_per_token_logps": batch.padded(batch.reference_log_probs),
            "num_items_in_batch": batch.mask.sum(),
        }
        if trainer == "GMPOTrainer":
            inputs["advantages"] = inputs["advantages"][:, 0]
        if ratio:
            inputs["importance_sampling_ratio"] = _importance_ratio(batch, settings)
        config = _config(settings)

        def loss(log_probs: Tensor) -> Tensor:
            stub = _stub(config, batch, log_probs)
            stub.get_off_policy_mask = owner.get_off_policy_mask
            stub.use_vllm = ratio
            result: Tensor = owner._compute_loss(stub, None, inputs)
            return result

        return with_gradient(loss, batch.log_probs, batch)

    return run


def rloo_loss(**settings: Any) -> Callable[[Batch], Results]:
    """Return the loss of RLOOTrainer and its gradient."""

    def run(batch: Batch) -> Results:
        padded = batch.padded(batch.mask)
        inputs = _inputs(batch) | {
            "advantages": batch.padded(batch.advantages)[:, 0],
            "old_logps": (batch.padded(batch.old_log_probs) * padded).sum(1),
        }
        config = _config(settings)

        def loss(log_probs: Tensor) -> Tensor:
            result: Tensor = _trainer("RLOOTrainer")._compute_loss(_stub(config, batch, log_probs), None, inputs)
            return result

        return with_gradient(loss, batch.log_probs, batch)

    return run


def group_advantages(trainer: str, **settings: Any) -> Callable[[Batch], Results]:
    """Return the advantages of responses by GRPOTrainer or RLOOTrainer: [sequences]."""
    marks = {"GRPOTrainer": "self.multi_objective_aggregation ==", "RLOOTrainer": "grouped_sum"}

    def run(batch: Batch) -> Results:
        stub = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1, dtype=torch.float64),
            scale_rewards=settings.get("scale_rewards", "group"),
            normalize_advantages=False,
        )
        values = {
            "self": stub,
            "rewards": batch.scores.clone(),
            "rewards_per_func": batch.scores.clone()[:, None],
            "unscorable_mask": torch.zeros(len(batch.scores), dtype=torch.bool),
            "num_generations": SAMPLES,
            "device": "cpu",
            "mode": "train",
        }
        method = _trainer(trainer)._generate_and_score_completions
        if trainer == "GRPOTrainer":
            _execute(method, [lambda text: text.startswith(f"if {marks[trainer]}")], values)
        else:
            _execute(method, [_assigns(name) for name in ("grouped_rewards", "scorable_counts", "grouped_sum")], values)
            _execute(method, [lambda text: text.startswith("if num_generations > 1") and "baselines" in text], values)
        return {"advantages": values["advantages"]}

    return run


def importance_ratio(**settings: Any) -> Callable[[Batch], Results]:
    """Return the weights for the mismatch of trainer and engine at the tokens of the mask: [tokens]."""

    def run(batch: Batch) -> Results:
        ratio = _importance_ratio(batch, settings)
        return {"weights": batch.flat(ratio.expand(batch.padded(batch.mask).shape)) * batch.mask}

    return run


def off_policy_mask(threshold: float) -> Callable[[Batch], Results]:
    """Return which tokens the off-policy sequence mask keeps: [tokens]."""

    def run(batch: Batch) -> Results:
        mask = batch.padded(batch.mask)
        keep = _trainer("GRPOTrainer").get_off_policy_mask(
            batch.padded(batch.advantages)[:, :1],
            batch.padded(batch.log_probs),
            batch.padded(batch.rollout_log_probs),
            mask,
            threshold,
        )
        return {"weights": batch.flat(keep.expand(mask.shape)) * batch.mask}

    return run


def entropy_controller(entropies: Sequence[float], coefficient: float, **settings: float) -> Callable[[Batch], Results]:
    """Return the entropy coefficient that each step applies, given the mean entropy of each step."""

    def run(batch: Batch) -> Results:
        owner = _trainer("GRPOTrainer")
        config = _config({"use_adaptive_entropy": True, "entropy_coef": coefficient, **settings})
        stub = _stub(config, batch, batch.log_probs)
        stub._entropy_bonus_enabled, stub._entropy_window_stats, stub._last_world_entropy = True, None, math.inf
        inputs = _inputs(batch) | {
            "advantages": torch.zeros_like(batch.padded(batch.mask)),
            "old_per_token_logps": batch.padded(batch.log_probs),
            "num_items_in_batch": batch.mask.sum(),
        }
        applied = []
        for value in entropies:
            entropy = torch.full_like(batch.padded(batch.mask), value).requires_grad_()
            stub._get_per_token_logps_and_entropies = lambda *_, entropy=entropy, **__: (
                batch.padded(batch.log_probs),
                entropy,
                None,
            )
            # The loss is minus the coefficient times the mean entropy, as the advantages are 0.
            (gradient,) = torch.autograd.grad(owner._compute_loss(stub, None, inputs), entropy)
            applied.append(-float(gradient.sum()))
        return {"coefficients": torch.tensor(applied, dtype=torch.float64)}

    return run


def _trainer(name: str) -> Any:
    if name == "GMPOTrainer":
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

        return GMPOTrainer
    import trl

    return getattr(trl, name)


def _config(settings: dict[str, Any]) -> SimpleNamespace:
    """Return a config with TRL's defaults where they are not off, and ``settings``."""
    defaults = {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "use_bias_correction_kl": False,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "max_completion_length": 16,
        "steps_per_generation": 1,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
    }
    return SimpleNamespace(**defaults | settings)


def _stub(config: SimpleNamespace, batch: Batch, log_probs: Tensor) -> Any:
    """Return an object with the attributes that a trainer's loss reads."""
    padded = batch.padded(log_probs)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    stub = SimpleNamespace(**vars(config))
    stub.args = config
    stub.epsilon_low, stub.epsilon_high = config.epsilon, high
    stub.accelerator = _Accelerator()
    stub.model = SimpleNamespace(training=True)
    stub.current_gradient_accumulation_steps = 1
    stub.aux_loss_enabled = stub.use_vllm = stub._entropy_bonus_enabled = False
    stub.vllm_importance_sampling_correction = True
    stub._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (padded, batch.padded(batch.entropies), None)
    return stub


def _inputs(batch: Batch) -> dict[str, Tensor]:
    mask = batch.padded(batch.mask)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}


def _importance_ratio(batch: Batch, settings: dict[str, Any]) -> Tensor:
    """Run the part of TRL's rollout that computes the ratio: [sequences, longest], or [sequences, 1] for whole responses."""
    stub = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        **{"vllm_importance_sampling_clip_min": None, **{k: v for k, v in settings.items() if k.startswith("vllm_")}},
    )
    values = {
        "self": stub,
        "completion_mask": batch.padded(batch.mask),
        "tool_mask": None,
        "old_per_token_logps": batch.padded(batch.old_log_probs),
        "sampling_per_token_logps": batch.padded(batch.rollout_log_probs),
    }
    method = _trainer("GRPOTrainer")._generate_and_score_completions
    _execute(method, [lambda text: text.startswith("if self.use_vllm") and "per_token_logps_diff" in text], values)
    result: Tensor = values["vllm_importance_sampling_ratio"]
    return result


def _assigns(name: str) -> Callable[[str], bool]:
    return lambda text: text.startswith(f"{name} =")


def _execute(method: Any, wanted: Sequence[Callable[[str], bool]], values: dict[str, Any]) -> None:
    """Run the first statement of a method that each of ``wanted`` accepts, with ``values`` as its variables."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    statements = sorted((node for node in ast.walk(tree) if isinstance(node, ast.stmt)), key=lambda node: node.lineno)
    for accepts in wanted:
        statement = next((node for node in statements[1:] if accepts(ast.unparse(node))), None)
        if statement is None:
            raise LookupError(f"{method.__qualname__} has no such statement; has TRL changed?")
        code = compile(ast.Module([statement], type_ignores=[]), inspect.getsourcefile(method) or "", "exec")
        exec(code, {**method.__globals__, "math": math}, values)  # noqa: S102
