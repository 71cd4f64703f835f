"""`quartet sft` and `quartet reward-model`: train a model on pairs or demonstrations, before RLHF."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from quartet.cli.console import make_console
from quartet.config.root import Config
from quartet.config.supervised import RewardModelConfig, SftConfig, StageConfig, load_any_config, load_stage
from quartet.errors import ConfigError
from quartet.system.machine import available_cores

console = make_console()


def train_stage(stage: str, path: Path, overrides: list[str], overwrite: bool, resume: bool) -> None:
    """Train the stage of a config, and print what to do next."""
    config = load_stage(stage, path, overrides)
    # Without torch, these imports fail; the message names the extra.
    import torch

    from quartet.models.torch_settings import set_up_torch
    from quartet.supervised.stage import next_command, run_stage

    set_up_torch(min(available_cores(), torch.get_num_threads()))
    output = run_stage(config, overwrite, resume, lambda line: console.print(line, soft_wrap=True))
    text = next_command(config, output)
    if following := _following_config(config, path, output):
        command = "reward-model" if isinstance(config, SftConfig) else "train"
        text = f"{text.partition('next: ')[0]}next: quartet {command} {quote(str(following))}"
    console.print(text, soft_wrap=True)


def _following_config(config: StageConfig, path: Path, output: Path) -> Path | None:
    """Return the config beside ``path`` that takes the model in ``output``, as `quartet init` writes it; None without one."""
    found = path.with_name("reward-model.yaml" if isinstance(config, SftConfig) else "train.yaml")
    try:
        following = load_any_config(found)
    except ConfigError:
        return None
    if isinstance(config, SftConfig):
        model = following.model.path if isinstance(following, RewardModelConfig) else None
    else:
        model = following.reward.model if isinstance(following, Config) else None
    return found if model is not None and Path(model) == output else None
