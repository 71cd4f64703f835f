"""Translation of a Quartet config to arguments of TRL's trainers. The caller adds the batch sizes."""

from __future__ import annotations

from typing import Any

from quartet.config.root import Config


def equal_settings(config: Config) -> list[str]:
    """Return overrides of a config for gae or rloo, so that a run does what TRL's trainer does with the same settings.

    TRL's trainers have no KL controller. Its PPO has one optimizer and learning rate for policy and value model, and clips no
    gradients. Its RLOO has one ratio per response, and a mean over responses.
    """
    rate = config.actor.learning_rate
    settings = [
        f"actor.learning_rate={rate}",
        "actor.schedule=constant",
        "actor.optimizer.betas=[0.9,0.999]",
        "algorithm.kl_controller.kind=fixed",
    ]
    if config.algorithm.estimator == "rloo":
        return [*settings, "algorithm.ratio_level=sequence", "algorithm.loss_aggregation=sequence_mean"]
    return [
        *settings,
        "actor.optimizer.max_grad_norm=0",
        f"critic.learning_rate={rate}",
        "critic.schedule=constant",
        "critic.optimizer.betas=[0.9,0.999]",
        "critic.optimizer.max_grad_norm=0",
    ]


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
        "cliprange": algorithm.clip_range[0],
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
        "epsilon": config.algorithm.clip_range[0],
        "disable_dropout": True,
    }


def _common(config: Config, folder: str) -> dict[str, Any]:
    optimizer = config.actor.optimizer
    return {
        "output_dir": folder,
        "seed": config.run.seed,
        "learning_rate": config.actor.learning_rate,
        "lr_scheduler_type": config.actor.schedule,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "temperature": config.rollout.temperature,
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": not config.services.actor.devices,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
