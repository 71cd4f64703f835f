"""The compared updates, each with other settings. One Config drives both sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.config.root import Config
from quartet.contract.random_streams import permutation
from tests.parity.checkpoints import ScenarioModels, make_scenario_models

SEED = 11
STEP = 1
TRL_BETAS = (0.9, 0.999)
ENDLESS, RAGGED = -30.0, 6.0
"""Values added to the logit of EOS: no response ends with EOS, or most do before the token limit."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One update. TRL splits a mini-batch into ``micro_batches``; Quartet splits it by ``micro_batch_tokens``."""

    name: str
    about: str
    algorithm: dict[str, Any]
    rollout: dict[str, Any]
    learning_rate: float
    eos_logit: float = RAGGED
    micro_batches: int = 1
    max_grad_norm: float = 0.0
    micro_batch_tokens: int = 4096

    @property
    def compares_entropy(self) -> bool:
        """Return whether TRL computes the entire first epoch with the weights that generated.

        This is so if no optimizer step comes before the end of the epoch.
        """
        return self.algorithm.get("num_mini_batches", 1) == 1

    def models(self, directory: Path) -> ScenarioModels:
        """Write the checkpoints, and prompts for two steps.

        One step is not enough: accelerate accumulates no gradients on the last batch of a data set.
        """
        return make_scenario_models(directory / self.name, 2 * self.rollout["prompts_per_step"], self.eos_logit, SEED)

    def config(self, models: ScenarioModels) -> Config:
        """Return the settings as the config of a run."""
        trained = {
            "learning_rate": self.learning_rate,
            "micro_batch_tokens": self.micro_batch_tokens,
            "optimizer": {"betas": TRL_BETAS, "max_grad_norm": self.max_grad_norm},
        }
        return Config.model_validate(
            {
                "run": {"name": "parity", "seed": SEED},
                "data": {"prompts": "prompts.jsonl"},
                "algorithm": {
                    "rollout_correction": {"level": "none"},
                    "truncation": {"treatment": "keep"},
                    **self.algorithm,
                },
                "rollout": {"max_response_tokens": 16, **self.rollout},
                "actor": {"model": str(models.policy), **trained},
                "critic": {"model": str(models.critic), **trained},
                "reward": {"model": str(models.reward)},
                "reference": {"model": str(models.reference)},
            }
        )


def responses(config: Config) -> int:
    """Return the number of responses of the step."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def order(config: Config, epoch: int) -> NDArray[np.int64]:
    """Return the order in which Quartet reads the step's responses, int64 [responses]."""
    n = responses(config)
    return permutation(config.run.seed, STEP, epoch, n) if config.algorithm.num_mini_batches > 1 else np.arange(n)


PPO = (
    Scenario(
        "ppo-full",
        "Every response has the maximum length, so TRL pads none of them. One mini-batch in two micro-batches.",
        {"num_epochs": 4},
        {"prompts_per_step": 16},
        learning_rate=5e-4,
        eos_logit=ENDLESS,
        micro_batches=2,
        micro_batch_tokens=120,
    ),
    Scenario(
        "ppo-ragged",
        "Responses end with EOS, or lack it and get a penalty. Two mini-batches, shuffled in every epoch.",
        {"num_epochs": 3, "num_mini_batches": 2, "truncation": {"treatment": "penalty", "penalty": 1.0}},
        {"prompts_per_step": 24},
        learning_rate=3e-4,
    ),
    Scenario(
        "ppo-settings",
        "These settings differ from their defaults: `whiten_rewards`, `gamma`, `gae_lambda`, `kl_coefficient`, `clip_ratio`, "
        "`value_clip`, `num_epochs` and `temperature`.",
        {
            "num_epochs": 2,
            "whiten_rewards": True,
            "gamma": 0.97,
            "gae_lambda": 0.8,
            "kl_coefficient": 0.3,
            "clip_ratio": 0.1,
            "value_clip": 0.15,
        },
        {"prompts_per_step": 16, "temperature": 0.7},
        learning_rate=3e-4,
    ),
)

_RLOO = {"estimator": "rloo", "ratio_level": "sequence", "loss_aggregation": "sequence_mean"}

RLOO = (
    Scenario(
        "rloo",
        "Four responses per prompt, six prompts, one mini-batch in two micro-batches, gradients clipped to norm 1.",
        {**_RLOO, "num_epochs": 4},
        {"prompts_per_step": 6, "samples_per_prompt": 4},
        learning_rate=5e-5,
        micro_batches=2,
        max_grad_norm=1.0,
        micro_batch_tokens=150,
    ),
    Scenario(
        "rloo-mini-batches",
        "Two mini-batches in the same shuffled order, with another temperature, clip ratio and KL coefficient.",
        {**_RLOO, "num_epochs": 3, "num_mini_batches": 2, "clip_ratio": 0.1, "kl_coefficient": 0.2},
        {"prompts_per_step": 6, "samples_per_prompt": 4, "temperature": 0.8},
        learning_rate=5e-5,
        max_grad_norm=1.0,
    ),
)
