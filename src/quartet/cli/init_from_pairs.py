"""`quartet init --from-pairs`: write the three configs from preference pairs to a policy, with all paths in place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from shlex import quote

import typer

from quartet.cli.init_config import RESPONSES_PER_STEP, Answers, config_text, moved_path, scalar
from quartet.config.loading import load_config
from quartet.config.supervised import load_stage
from quartet.data.preference_pairs import Pair, is_held_out, messages_of, read_pairs, write_json_lines
from quartet.errors import ConfigError
from quartet.system.durable_files import write_durably

NAMES = ("sft", "reward-model", "train")
VALIDATION_FRACTION = 0.05
MAX_TOKENS = 1024


def init_from_pairs(folder: Path, pairs_file: Path, answers: Answers, overwrite: bool) -> None:
    """Write sft.yaml, reward-model.yaml and train.yaml to ``folder``, and the prompts of the pairs. Raises ConfigError.

    ``answers`` have the base model as the policy. Conversations that are held out from all three are the same.
    """
    if folder.suffix in (".yaml", ".yml") and not folder.is_dir():
        raise ConfigError(f"init --from-pairs {folder}: writes several files; give a folder, such as {folder.stem}")
    if answers.policy is None:
        raise ConfigError(
            "init --from-pairs: give the model to start from with --policy MODEL: a chat model, such as its hub id"
        )
    if answers.reward or answers.reward_function or answers.prompts:
        raise ConfigError(
            "init --from-pairs: takes no --prompts, --reward and --reward-function; the pairs replace them"
        )
    configs = {name: folder / f"{name}.yaml" for name in NAMES}
    prompts, validation = folder / "prompts.jsonl", folder / "validation_prompts.jsonl"
    existing = [path for path in (*configs.values(), prompts, validation) if path.exists()]
    if existing and not overwrite:
        raise ConfigError(f"{existing[0]}: exists; choose another folder, or replace it with --overwrite")
    pairs = read_pairs(pairs_file)
    sides = {
        path: list(dict.fromkeys(pair.prompt for pair in pairs if _is_held_out(pair) is held_out))
        for path, held_out in ((prompts, False), (validation, True))
    }
    if not sides[prompts]:
        raise ConfigError(f"{pairs_file}: all {len(pairs)} pairs are held out; give more pairs")
    if not sides[validation]:
        typer.echo(
            f"warning: {pairs_file}: none of {len(pairs):,} pairs is held out, so nothing is evaluated; give more pairs, or name "
            "held-out ones as data.validation in each config",
            err=True,
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, rows in sides.items():
        write_json_lines(path, ({"prompt": messages_of(prompt)} for prompt in rows))
    base = moved_path(folder, answers.policy)
    rows_file = os.path.relpath(pairs_file, folder) if not pairs_file.is_absolute() else str(pairs_file)
    texts = {name: _stage_text(name, rows_file, base if name == "sft" else "runs/sft/policy") for name in NAMES[:2]}
    answers.policy, answers.reward, answers.prompts = "runs/sft/policy", "runs/reward-model/reward", Path(prompts.name)
    with contextlib.chdir(folder):
        text = config_text(Path("train.yaml"), answers, min(RESPONSES_PER_STEP, len(sides[prompts])), shape_of=base)
    if sides[validation]:
        text = text.replace("  # validation: validation.jsonl", f"  validation: {validation.name}")
    for name, path in configs.items():
        write_durably(path, texts.get(name, text))
    for name, path in configs.items():
        load_config(path) if name == "train" else load_stage(name, path)
    change = f"cd {quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    typer.echo(f"{len(pairs):,} pairs; written to {folder}: {', '.join(path.name for path in configs.values())}")
    typer.echo(
        f"to train: {change}quartet sft sft.yaml && quartet reward-model reward-model.yaml && quartet train train.yaml"
    )


def _is_held_out(pair: Pair) -> bool:
    return is_held_out(pair.opening, VALIDATION_FRACTION)


def _stage_text(stage: str, rows: str, model: str) -> str:
    about, key = {
        "sft": ("Supervised fine-tuning on the chosen answers", "model to start from"),
        "reward-model": (
            "Training of a reward model on the pairs",
            "policy, whose tokenizer the reward model must have",
        ),
    }[stage]
    return f"""\
# {about}. In this folder: quartet {stage} {stage}.yaml
# Settings that are left out have a default: quartet config show {stage}.yaml prints all of them.
stage: {stage}
run:
  # The run is stored in runs/{stage}.
  name: {stage}
  epochs: 1

data:
  # Rows with chosen and rejected, beside prompt or with it. {VALIDATION_FRACTION:.0%} of the conversations are held out.
  train: {scalar(rows)}
  validation_fraction: {VALIDATION_FRACTION}
  # Longer conversations are left out.
  max_tokens: {MAX_TOKENS}

model:
  # The {key}.
  path: {scalar(model)}
  # Mixed precision, for a GPU:
  # dtype: bfloat16
  # Train adapters instead of all weights; they are merged into the result:
  # lora: {{rank: 16}}

training:
  # Rows of an optimizer step, and of a forward pass.
  batch_size: 64
  micro_batch_size: 8
  # Change this first. LoRA needs about 1.0e-4, a tiny model about 1.0e-3.
  learning_rate: 1.0e-5

evaluation:
  # Steps between evaluations on the held-out rows.
  every_steps: 50

checkpoint:
  # quartet {stage} {stage}.yaml --resume continues an interrupted run from the last one.
  every_steps: 100
"""
