"""The demo's toy task: a tiny policy, its reward model and prompts, made on first use in under a minute on one CPU core."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quartet.atomic_directory import staged_directory
from quartet.demo import corpus
from quartet.errors import ConfigError
from quartet.models import pretraining
from quartet.models.pretraining import ProgressCallback, Schedule, Shape

_FORMAT = 1
"""Raised whenever the recipe changes what a seed makes, so that toy tasks made before are made again."""


@dataclass(frozen=True, slots=True)
class ToyTask:
    """Where the pieces are: two Hugging Face checkpoints, each with the tokenizer, and a prompts file."""

    policy: Path
    reward: Path
    prompts: Path


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a toy task is made. The defaults are the demo's."""

    vocabulary: int = 512
    shape: Shape = field(default_factory=lambda: Shape(hidden=64, layers=2, heads=4, positions=128))
    reviews: int = 6000
    preferences: int = 6000
    policy: Schedule = field(default_factory=lambda: Schedule(steps=450, learning_rate=5e-3, weight_decay=0.0))
    reward: Schedule = field(default_factory=lambda: Schedule(steps=250, batch_sequences=32, learning_rate=2e-3))


def make_toy_task(
    directory: Path, seed: int = 0, progress: ProgressCallback | None = None, recipe: Recipe | None = None
) -> ToyTask:
    """The toy task at ``directory``, made there unless a complete one of the same seed and recipe stands there already.

    A toy task appears whole or not at all; whatever else stands at ``directory`` is replaced only if it is an older, another
    or a damaged toy task, or empty. Raises ConfigError where it is something else.
    """
    recipe = recipe or Recipe()
    toy_task = ToyTask(directory / "policy", directory / "reward", directory / "prompts.jsonl")
    label = {"format": _FORMAT, "seed": seed, **asdict(recipe)}
    if _is_complete(directory, toy_task, label):
        return toy_task
    _check_replaceable(directory)
    with staged_directory(directory) as staging:
        _build(staging, seed, progress, recipe)
        sizes = {str(path.relative_to(staging)): path.stat().st_size for path in sorted(staging.rglob("*.*"))}
        (staging / "toy_task.json").write_text(json.dumps({"recipe": label, "files": sizes}, indent=2) + "\n")
    return toy_task


def _build(directory: Path, seed: int, progress: ProgressCallback | None, recipe: Recipe) -> None:
    prompts = corpus.prompts()
    reviews = corpus.reviews(recipe.reviews, seed)
    tokenizer = pretraining.train_tokenizer([review.text for review in reviews], recipe.vocabulary)

    policy = pretraining.train_causal_lm(
        [review.text for review in reviews], tokenizer, recipe.shape, recipe.policy, seed=seed, progress=progress
    )
    pretraining.save_checkpoint(policy, tokenizer, directory / "policy")

    pairs = corpus.preferences(recipe.preferences, seed)
    chosen = pretraining.encode(tokenizer, [pair.prompt + pair.chosen for pair in pairs], eos=True)
    rejected = [
        pretraining.encode(tokenizer, [pair.prompt + pair.rejected], eos=not pair.unfinished)[0] for pair in pairs
    ]
    reward = pretraining.train_preference_model(
        list(zip(chosen, rejected, strict=True)),
        tokenizer,
        recipe.shape,
        recipe.reward,
        body=policy,
        seed=seed,
        progress=progress,
    )
    pretraining.save_checkpoint(reward, tokenizer, directory / "reward")

    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": prompt}) + "\n" for prompt in prompts)


def _is_complete(directory: Path, toy_task: ToyTask, label: dict[str, object]) -> bool:
    """Return whether ``toy_task.json`` names this recipe and every file it lists is there in its full size."""
    try:
        written = json.loads((directory / "toy_task.json").read_text())
        sizes = {name: (directory / name).stat().st_size for name in written["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    pieces = (toy_task.policy, toy_task.reward, toy_task.prompts)
    return bool(written["recipe"] == label and written["files"] == sizes and all(piece.exists() for piece in pieces))


def _check_replaceable(directory: Path) -> None:
    """Raise ConfigError where ``directory`` is a file or holds what no toy task has."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is a file, expected a directory to make the demo's toy task in")
    strangers = sorted(
        {entry.name for entry in directory.iterdir()} - {"policy", "reward", "prompts.jsonl", "toy_task.json"}
    )
    if strangers:
        raise ConfigError(f"{directory}: holds {strangers[0]!r}, no part of a demo's toy task; give another directory")
