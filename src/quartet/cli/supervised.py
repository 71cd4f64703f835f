"""`quartet sft` and `quartet reward-model`: train a model on pairs or demonstrations, before RLHF."""

from __future__ import annotations

from pathlib import Path

from quartet.cli.console import make_console
from quartet.config.supervised import load_stage
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
    console.print(next_command(config, output), soft_wrap=True)
