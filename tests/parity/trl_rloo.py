"""One generation of TRL's RLOOTrainer and the updates on it, with the intermediate results captured."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from trl import RLOOConfig, RLOOTrainer
from trl.trainer import rloo_trainer

from benchmarks.trl_rewriting import rewritten
from benchmarks.trl_settings import rloo_settings
from quartet.config.root import Config
from tests.parity.checkpoints import EOS, ScenarioModels, make_tokenizer
from tests.parity.comparison import Number
from tests.parity.rollouts import Rollouts, TrlUpdate
from tests.parity.scenarios import order, responses

BY_TOKENS = {
    "is_region_clipped.float().mean()": "(is_region_clipped * completion_mask.sum(1)).sum() / completion_mask.sum()",
}
"""Expression for the clip fraction, replaced by one that weights each response by its tokens."""


class _Captured(RLOOTrainer):
    """Trainer that records the inputs of the update and its logged metrics."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.generated: dict[str, Any] = {}
        self.rewards = torch.empty(0)
        self.log_probs: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.statistics: dict[str, list[float]] = {}
        self.grad_norms: list[float] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.generated = super()._generate_and_score_completions(inputs)
        return self.generated

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        self.rewards = super()._calculate_rewards(*arguments)
        return self.rewards

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if len(self.log_probs) < 2:
            self.log_probs.append(result[0])
        return result

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name, values in self._metrics["train"].items():
            self.statistics.setdefault(name, []).extend(values)
        self._metrics["train"].clear()
        if "grad_norm" in logs:
            self.grad_norms.append(float(logs["grad_norm"]))


def run(models: ScenarioModels, config: Config, micro_batches: int) -> TrlUpdate:
    """Generate once, and take the optimizer steps on the result: epochs times mini-batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trainer = _trainer(models, config, micro_batches, folder)
        # By default the reference is the initial policy, and the KL to it is 0.
        trainer.ref_model = transformers.AutoModelForCausalLM.from_pretrained(models.reference, dtype=torch.float32)
        rows = torch.from_numpy(order(config, 0))
        stack.enter_context(mock.patch.object(rloo_trainer, "shuffle_sequence_dict", functools.partial(_take, rows)))
        stack.enter_context(
            mock.patch.object(RLOOTrainer, "_compute_loss", rewritten(RLOOTrainer._compute_loss, BY_TOKENS))
        )
        trainer.train()
    return _update(trainer, config, micro_batches)


def _take(rows: torch.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


def _trainer(models: ScenarioModels, config: Config, micro_batches: int, folder: str) -> _Captured:
    algorithm = config.algorithm
    steps_per_generation = algorithm.num_mini_batches * micro_batches
    settings = RLOOConfig(
        **rloo_settings(config, folder),
        per_device_train_batch_size=responses(config) // steps_per_generation,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=steps_per_generation,
        max_steps=algorithm.num_epochs * algorithm.num_mini_batches,
    )
    return _Captured(
        args=settings,
        processing_class=make_tokenizer(),
        model=transformers.AutoModelForCausalLM.from_pretrained(models.policy, dtype=torch.float32),
        reward_funcs=_score_ids(models),
        train_dataset=datasets.Dataset.from_dict({"prompt": models.texts()}),
    )


def _score_ids(models: ScenarioModels) -> Callable[..., list[float]]:
    """Return a reward function that scores the token ids. TRL itself decodes them, drops EOS and tokenises again."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(models.reward, dtype=torch.float32).eval()
    tokenizer = make_tokenizer()

    def score_ids(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        with torch.inference_mode():
            return [
                model(input_ids=torch.tensor([tokenizer(prompt)["input_ids"] + ids])).logits.item()
                for prompt, ids in zip(prompts, completion_ids, strict=True)
            ]

    return score_ids


def _update(trainer: _Captured, config: Config, micro_batches: int) -> TrlUpdate:
    generated, statistics = trainer.generated, trainer.statistics
    keep = generated["completion_mask"].bool()
    log_probs, reference = trainer.log_probs
    counts = keep.sum(1).double()
    micro = config.algorithm.num_mini_batches * micro_batches
    shares = counts[torch.from_numpy(order(config, 0))].view(micro, -1).sum(1) / counts.sum()

    def over_tokens(name: str, epochs: slice = slice(None)) -> float:
        """Return a statistic averaged over micro-batches, weighted by their tokens."""
        result = torch.tensor(statistics[name], dtype=torch.float64).view(config.algorithm.num_epochs, micro)
        return float((result * shares).sum(1)[epochs].mean())

    metrics: dict[str, Number] = {
        "log_probs": log_probs[keep].numpy(),
        "reference_log_probs": reference[keep].numpy(),
        "scores": trainer.rewards[:, 0].numpy(),
        "advantages": generated["advantages"].repeat_interleave(keep.sum(1)).numpy(),
        "kl_mean": float(np.mean(statistics["kl"]) * counts.sum() / len(counts)),
        "policy_loss": float(np.mean(trainer.losses)),
        "clip_fraction": over_tokens("clip_ratio/region_mean"),
        "entropy": over_tokens("entropy", slice(1)),
        "grad_norm": float(np.mean(trainer.grad_norms)),
    }
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return TrlUpdate(_rollouts(generated, keep, log_probs, config), metrics, weights)


def _rollouts(generated: dict[str, Any], keep: torch.Tensor, log_probs: torch.Tensor, config: Config) -> Rollouts:
    prompts = zip(generated["prompt_ids"], generated["prompt_mask"].bool(), strict=True)
    responses = [
        ids[mask].numpy().astype(np.int32) for ids, mask in zip(generated["completion_ids"], keep, strict=True)
    ]
    return Rollouts(
        prompts=[ids[mask].numpy().astype(np.int32) for ids, mask in prompts],
        responses=responses,
        prompt_index=[index // config.rollout.samples_per_prompt for index in range(len(responses))],
        truncated=[int(response[-1]) != EOS for response in responses],
        log_probs=log_probs[keep].numpy(),
    )
