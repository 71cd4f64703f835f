"""The demo's toy task: a tiny policy, its reward model and prompts, created on first use in under a minute on one CPU core."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quartet.demo import corpus, pretraining
from quartet.demo.pretraining import ProgressCallback, Schedule, Shape
from quartet.errors import ConfigError
from quartet.system.durable_files import staged_directory

_FORMAT = 1
"""Version of the recipe. Increase it if the same seed gives another toy task, so that old toy tasks are recreated."""


@dataclass(frozen=True, slots=True)
class ToyTask:
    """Paths of two Hugging Face checkpoints, each with the tokenizer, and of a prompts file."""

    policy: Path
    reward: Path
    prompts: Path


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings for the creation of a toy task. The defaults are the demo's."""

    vocabulary: int = 512
    shape: Shape = field(default_factory=lambda: Shape(hidden=64, layers=2, heads=4, positions=128))
    reviews: int = 6000
    preferences: int = 6000
    policy: Schedule = field(default_factory=lambda: Schedule(steps=450, learning_rate=5e-3, weight_decay=0.0))
    reward: Schedule = field(default_factory=lambda: Schedule(steps=250, batch_sequences=32, learning_rate=2e-3))


def make_toy_task(
    directory: Path, seed: int = 0, progress: ProgressCallback | None = None, recipe: Recipe | None = None
) -> ToyTask:
    """Return the toy task at ``directory``. Create it unless a complete one of the same seed and recipe exists there.

    The directory is replaced atomically, if it is empty or contains an older, different or damaged toy task. Raises ConfigError
    if it contains anything else.
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
    """Raise ConfigError if ``directory`` is a file or contains files that are not part of a toy task."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is a file, expected a directory to make the demo's toy task in")
    other_files = sorted(
        {entry.name for entry in directory.iterdir()} - {"policy", "reward", "prompts.jsonl", "toy_task.json"}
    )
    if other_files:
        raise ConfigError(f"{directory}: contains {other_files[0]!r}, not part of a toy task; give another directory")
