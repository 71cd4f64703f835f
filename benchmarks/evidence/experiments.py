"""The experiments of the evidence: which configs, with which settings and seeds, and where their files are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from benchmarks.trl_settings import equal_settings
from quartet.config.loading import load_config
from quartet.config.root import Config

Side = Literal["quartet", "trl", "trl_eos", "initial"]
"""Trainer of the policy. ``trl_eos``: TRL's PPO with the score at EOS, not one position after it. ``initial``: the policy before
training."""
TRL_SIDES: tuple[Side, ...] = ("trl", "trl_eos")

VALIDATION = 2000
"""Number of prompts that final policies answer. No run trains on them."""
ALGORITHMS = ("ppo", "rloo", "grpo", "reinforce_plus_plus", "gspo", "cispo", "lora")
"""Configs in configs/reviews that are compared with each other."""
VARIATIONS: dict[str, tuple[str, ...]] = {
    "no change": (),
    "half the learning rate": ("actor.learning_rate=5e-5", "critic.learning_rate=2.5e-4"),
    "twice the learning rate": ("actor.learning_rate=2e-4", "critic.learning_rate=1e-3"),
    "β₂ 0.999": ("actor.optimizer.betas=[0.9,0.999]", "critic.optimizer.betas=[0.9,0.999]"),
    "1 epoch": ("algorithm.num_epochs=1",),
    "2 epochs": ("algorithm.num_epochs=2",),
    "4 mini-batches": ("algorithm.num_mini_batches=4",),
    "clip ratio 0.1": ("algorithm.clip_ratio=0.1",),
    "constant learning rate": ("actor.schedule=constant", "critic.schedule=constant"),
    "fixed KL coefficient 0.1": ("algorithm.kl_controller.kind=fixed",),
}
"""Variations of configs/reviews/ppo.yaml, to choose its settings."""
BESIDE_TRL: dict[str, tuple[str, ...]] = {
    "ppo": ("actor.learning_rate=3.4e-5", "algorithm.kl_coefficient=0.05"),
    "rloo": ("actor.learning_rate=6e-5", "algorithm.kl_coefficient=0.05"),
}
"""Settings beside TRL, whose trainers have no KL controller: with the learning rates of the configs, the KL would grow without a
limit on both sides."""


@dataclass(frozen=True)
class Experiment:
    """One run of one side, on the models of ``model_seed``. ``settings`` override ``config``."""

    group: str
    config: Path
    model_seed: int
    run_seed: int
    steps: int
    settings: tuple[str, ...]
    folder: Path
    side: Side = "quartet"

    @property
    def name(self) -> str:
        """Return the name of the run and of its files."""
        return f"{self.group}-{self.config.stem}-{self.side}-model{self.model_seed}-seed{self.run_seed}".replace(
            "_", "-"
        )

    @property
    def models(self) -> Path:
        """Return the directory of policy, reward model and prompts."""
        return self.folder / "models" / str(self.model_seed)

    @property
    def run_directory(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def overrides(self) -> list[str]:
        """Return all overrides of the config."""
        return [
            *self.settings,
            f"run.name={self.name}",
            f"run.directory={self.folder / 'runs'}",
            f"run.seed={self.run_seed}",
            f"run.steps={self.steps}",
            f"data.prompts={self.models / 'training.jsonl'}",
            f"data.validation={self.models / 'validation.jsonl'}",
            f"evaluation.max_prompts={VALIDATION}",
            f"actor.model={self.models / 'policy'}",
            f"reward.model={self.models / 'reward'}",
            "gateway.enabled=false",
        ]

    def load(self) -> Config:
        """Return the config. Raises ConfigError."""
        return load_config(self.config, self.overrides)

    @cached_property
    def digest(self) -> str:
        """Return a digest of the settings: a result with another one is of another experiment.

        Models and prompts are part of it by the number of their seed only, so that a result is valid on other machines, too.
        """
        settings = json.dumps([self.side, self.load().model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(settings.replace(str(self.folder), "").encode()).hexdigest()[:16]


def algorithm_runs(
    folder: Path, names: Sequence[str], model_seeds: Sequence[int], run_seeds: Sequence[int], steps: int
) -> list[Experiment]:
    """Return the runs that compare algorithms, all with ``steps`` steps."""
    return [
        Experiment("algorithm", _config(name), model, seed, steps, (), folder)
        for seed in run_seeds
        for model in model_seeds
        for name in names
    ]


def initial_policies(folder: Path, model_seeds: Sequence[int]) -> list[Experiment]:
    """Return the policy of each model seed before any training, which is scored only."""
    return [Experiment("initial", _config("ppo"), model, 0, 1, (), folder, "initial") for model in model_seeds]


def variation_runs(folder: Path, model_seeds: Sequence[int], steps: int) -> list[Experiment]:
    """Return runs of each variation of the default config, one on each model seed; without changes, runs of the algorithm."""
    config = _config("ppo")
    return [
        Experiment(f"variation{number}" if settings else "algorithm", config, model, 0, steps, settings, folder)
        for number, settings in enumerate(VARIATIONS.values())
        for model in model_seeds
    ]


def default_runs(folder: Path, model_seeds: Sequence[int]) -> list[Experiment]:
    """Return runs of configs/reviews/ppo.yaml as it is, on each model seed."""
    config = _config("ppo")
    steps = load_config(config).run.steps
    return [Experiment("default", config, model, 0, steps, (), folder) for model in model_seeds]


def trl_runs(
    folder: Path, names: Sequence[str], model_seeds: Sequence[int], run_seeds: Sequence[int], steps: int
) -> list[Experiment]:
    """Return a run of each side for each config, model and seed, with equal settings."""
    return [
        Experiment(
            "beside",
            _config(name),
            model,
            seed,
            steps,
            (*BESIDE_TRL[name], *equal_settings(load_config(_config(name), list(BESIDE_TRL[name])))),
            folder,
            side,
        )
        for seed in run_seeds
        for model in model_seeds
        for name in names
        for side in ("quartet", *(TRL_SIDES if name == "ppo" else TRL_SIDES[:1]))
    ]


def _config(name: str) -> Path:
    return Path("configs/reviews") / f"{name}.yaml"
