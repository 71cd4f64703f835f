"""Translation of a Quartet config to arguments of TRL's trainers. The caller adds the batch sizes."""

from __future__ import annotations

from typing import Any

from quartet.config import Config


def ppo_settings(config: Config, folder: str) -> dict[str, Any]:
    """Return arguments of a PPOConfig whose output directory is ``folder``."""
    algorithm = config.algorithm
    return {
        **_common(config, folder),
        "num_mini_batches": algorithm.num_mini_batches,
        "num_ppo_epochs": algorithm.num_epochs,
        "num_sample_generations": 0,
        "response_length": config.rollout.max_response_tokens,
        "stop_token": "eos",
        "missing_eos_penalty": algorithm.truncation.penalty if algorithm.truncation.treatment == "penalty" else None,
        "kl_coef": algorithm.kl_coefficient,
        "cliprange": algorithm.clip_ratio,
        "cliprange_value": algorithm.value_clip,
        "vf_coef": 1.0,
        "gamma": algorithm.gamma,
        "lam": algorithm.gae_lambda,
        "whiten_rewards": algorithm.whiten_rewards,
    }


def rloo_settings(config: Config, folder: str) -> dict[str, Any]:
    """Return arguments of an RLOOConfig whose output directory is ``folder``."""
    return {
        **_common(config, folder),
        "num_generations": config.rollout.samples_per_prompt,
        "num_iterations": config.algorithm.num_epochs,
        "max_completion_length": config.rollout.max_response_tokens,
        "beta": config.algorithm.kl_coefficient,
        "epsilon": config.algorithm.clip_ratio,
        "disable_dropout": True,
    }


def _common(config: Config, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "seed": config.run.seed,
        "learning_rate": config.actor.learning_rate,
        "lr_scheduler_type": "constant",
        "temperature": config.rollout.temperature,
        "max_grad_norm": config.actor.optimizer.max_grad_norm,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not config.services.actor.devices,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
