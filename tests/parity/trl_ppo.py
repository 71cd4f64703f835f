"""One update of TRL's PPOTrainer on the checkpoints, with its intermediate results captured."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from numpy.typing import NDArray
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.trl_rewriting import rewritten
from benchmarks.trl_settings import ppo_settings
from benchmarks.trl_training import SCORE_AT_EOS
from quartet.config.root import Config
from tests.parity.checkpoints import EOS, PAD, ScenarioModels, make_tokenizer
from tests.parity.comparison import Number, Weights
from tests.parity.rollouts import Rollouts, TrlUpdate
from tests.parity.scenarios import order, responses

REWRITTEN = {
    **SCORE_AT_EOS,
    "entropy.mean()": "masked_mean(entropy, ~padding_mask[micro_batch_inds])",
    "(logprobs_diff ** 2).mean()": "masked_mean(logprobs_diff ** 2, ~padding_mask[micro_batch_inds])",
}
"""Expressions that put score and value one position past EOS, or average over padding, and their replacements."""

LOGGED = {
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "clip_fraction": "policy/clipfrac_avg",
    "value_clip_fraction": "val/clipfrac_avg",
    "approx_kl": "policy/approxkl_avg",
    "entropy": "policy/entropy_avg",
}
"""Names of TRL's logged metrics, by the name of the metric in Quartet."""


class _Captured(PPOTrainer):
    """Trainer that records the local variables of train() when it logs, at the end of its only update."""

    variables: dict[str, Any]
    logged: dict[str, float]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        self.variables, self.logged = dict(frame.f_back.f_locals), dict(logs)


def run(models: ScenarioModels, config: Config, micro_batches: int, as_shipped: bool = False) -> TrlUpdate:
    """Run the update. ``as_shipped``: switch off no difference from Quartet except settings and order of sequences."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trainer = _trainer(models, config, micro_batches, folder)
        stack.enter_context(mock.patch.object(np.random, "permutation", _orders(config)))
        train = trainer.train
        if not as_shipped:
            # One optimizer step per mini-batch, not one per gradient_accumulation_steps micro-batches.
            trainer.accelerator.gradient_accumulation_steps = micro_batches
            stack.enter_context(_population_variance())
            train = functools.partial(rewritten(PPOTrainer.train, REWRITTEN), trainer)
        with contextlib.redirect_stdout(io.StringIO()):
            train()
    return _update(trainer, config, micro_batches, as_shipped)


def _orders(config: Config) -> Callable[[int], NDArray[np.int64]]:
    """Return a replacement for numpy.random.permutation that gives Quartet's order of each epoch in turn."""
    epochs = itertools.count()
    return lambda _: order(config, next(epochs))


@contextlib.contextmanager
def _population_variance() -> Iterator[None]:
    biased = functools.partial(ppo_trainer.masked_var, unbiased=False)
    with mock.patch.object(ppo_trainer, "masked_var", biased):
        yield


def _trainer(models: ScenarioModels, config: Config, micro_batches: int, folder: str) -> _Captured:
    algorithm, batch = config.algorithm, responses(config)
    accumulation = algorithm.num_mini_batches * micro_batches
    settings = PPOConfig(
        **ppo_settings(config, folder),
        per_device_train_batch_size=batch // accumulation,
        gradient_accumulation_steps=accumulation,
        total_episodes=batch,
        local_rollout_forward_batch_size=batch,
    )
    classifier = transformers.AutoModelForSequenceClassification
    causal_lm = transformers.AutoModelForCausalLM
    return _Captured(
        args=settings,
        processing_class=make_tokenizer(),
        model=causal_lm.from_pretrained(models.policy, dtype=torch.float32),
        ref_model=causal_lm.from_pretrained(models.reference, dtype=torch.float32),
        reward_model=classifier.from_pretrained(models.reward, dtype=torch.float32),
        value_model=classifier.from_pretrained(models.critic, dtype=torch.float32),
        train_dataset=datasets.Dataset.from_dict({"input_ids": models.prompts}),
    )


def _update(trainer: _Captured, config: Config, micro_batches: int, as_shipped: bool) -> TrlUpdate:
    result, logged = trainer.variables, trainer.logged
    keep = ~result["padding_mask"]
    counts = _token_counts(keep, config, micro_batches)

    def filled(name: str) -> torch.Tensor:
        """Return a statistic of every micro-batch, without the slots that TRL leaves empty."""
        return result[name][:, :, :micro_batches].double()

    def over_tokens(name: str, epochs: slice = slice(None)) -> float:
        return float((filled(name) * counts)[epochs].sum() / counts[epochs].sum())

    metrics: dict[str, Number] = {
        "log_probs": result["logprobs"][keep].numpy(),
        "reference_log_probs": result["ref_logprobs"][keep].numpy(),
        "values": result["values"][keep].numpy(),
        "scores": result["scores"].numpy(),
        "advantages": result["advantages"][keep].numpy(),
        "returns": result["returns"][keep].numpy(),
        "kl_mean": logged["objective/kl"],
    }
    if as_shipped:
        metrics |= {name: logged[theirs] for name, theirs in LOGGED.items()}
    else:
        metrics |= {
            "policy_loss": float(filled("pg_loss_stats").mean()),
            "value_loss": float(filled("vf_loss_stats").mean()),
            "clip_fraction": over_tokens("pg_clipfrac_stats"),
            "value_clip_fraction": over_tokens("vf_clipfrac_stats"),
            "approx_kl": over_tokens("approxkl_stats"),
            "entropy": over_tokens("entropy_stats", slice(1)),
        }
    return TrlUpdate(_rollouts(result, keep), metrics, _weights(trainer.policy_model), _weights(trainer.value_model))


def _rollouts(result: dict[str, Any], keep: torch.Tensor) -> Rollouts:
    context = result["context_length"]
    queries = result["query_responses"][:, :context]
    responses = [row[mask].numpy().astype(np.int32) for row, mask in zip(result["responses"], keep, strict=True)]
    if any(PAD in response for response in responses):
        raise RuntimeError(
            "a response contains the pad token, which the two sides treat differently; choose another seed"
        )
    return Rollouts(
        prompts=[row[row != PAD].numpy().astype(np.int32) for row in queries],
        responses=responses,
        prompt_index=list(range(len(responses))),
        truncated=[int(response[-1]) != EOS for response in responses],
        log_probs=result["logprobs"][keep].numpy(),
    )


def _token_counts(keep: torch.Tensor, config: Config, micro_batches: int) -> torch.Tensor:
    """Return the response tokens of each micro-batch, float64 [epochs, mini-batches, micro-batches]."""
    counts, shape = keep.sum(1).double(), (config.algorithm.num_mini_batches, micro_batches, -1)
    orders = [torch.from_numpy(order(config, epoch)) for epoch in range(config.algorithm.num_epochs)]
    return torch.stack([counts[rows].view(shape).sum(-1) for rows in orders])


def _weights(model: Any) -> Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
