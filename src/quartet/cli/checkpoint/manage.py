"""`quartet checkpoints`, `rollback` and `branch`: what a run has kept, under which names, and going on from there another way."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quartet.config import Config, is_redacted, load_config, redact_url
from quartet.durable_files import write_durably
from quartet.errors import ConfigError
from quartet.preflight import check_inputs
from quartet.run_directory.checkpoints import (
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    named_checkpoints,
    read_checkpoint,
    roll_back,
    step_of,
    whole_checkpoint,
)
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.types import TRAINED_ROLES, Role

console = Console()

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def show(run: Path, verify: bool) -> bool:
    """Prints a run's checkpoints; with ``verify`` reads every byte. Gives whether all can be used. Raises ConfigError."""
    files = run_files(run)
    folders, named = checkpoint_folders(files), named_checkpoints(files)
    table = Table("step", "name", "size", "leader epoch", "state", title=f"checkpoints of {run}")
    fine = True
    for path in folders:
        names = ", ".join(name for name, folder in named.items() if folder == path.name)
        try:
            found = whole_checkpoint(path) if verify else read_checkpoint(path)
            size = f"{found.bytes / 2**20:.1f} MiB"
            table.add_row(str(found.step), names, size, str(found.leader_epoch), "whole" if verify else "not verified")
        except DamagedCheckpoint as damage:
            fine = False
            table.add_row(str(step_of(path)), names, "", "", f"damaged: {damage}")
    if folders:
        console.print(table)
    else:
        console.print(f"{run}: no checkpoints yet", highlight=False)
    return fine


def name(run: Path, which: str, new: str) -> None:
    """Gives a checkpoint a name: it is kept until the name is forgotten. The run may go on. Raises ConfigError."""
    files = run_files(run)
    if not _NAME.fullmatch(new) or new.startswith("step-") or new.isdecimal():
        raise ConfigError(
            f"name {new!r}: expected up to 64 letters, digits, '.', '_' and '-', not a number alone, and not step-..."
        )
    folder = checkpoint_at(files, which).path
    link = files.checkpoints / new
    try:
        link.symlink_to(folder.name)
    except FileExistsError:
        if named_checkpoints(files).get(new) == folder.name:
            return
        raise ConfigError(
            f"name {new}: {named_checkpoints(files).get(new, 'something else')} has it; forget that first"
        ) from None
    # The run may have dropped it a moment ago.
    if not folder.is_dir():
        link.unlink(missing_ok=True)
        raise ConfigError(f"checkpoint {folder}: the run dropped it just now; name another")
    console.print(f"{run}: step {step_of(folder)} is kept as {new}", highlight=False, soft_wrap=True)


def forget(run: Path, old: str) -> None:
    """Takes a name away: the checkpoint goes when it is not among the newest. Raises ConfigError."""
    files = run_files(run)
    if old not in named_checkpoints(files):
        raise ConfigError(f"run {files.root}: no checkpoint is named {old}; {_known(files)}")
    (files.checkpoints / old).unlink(missing_ok=True)
    console.print(f"{run}: {old} is forgotten", highlight=False, soft_wrap=True)


def rollback(run: Path, which: str) -> None:
    """Forgets what came after a checkpoint; ``quartet train --resume`` goes on from there. Raises ConfigError."""
    files = run_files(run)
    with files.claimed():
        config, step = load_config(files.config), checkpoint_at(files, which).step
        roll_back(files, step)
    console.print(
        f"{run}: is at step {step}; metrics, trajectories and checkpoints after it and the saved policy are removed; "
        f"{_how_to_go_on(files, config)}",
        highlight=False,
        soft_wrap=True,
    )


def branch(run: Path, which: str, name: str, overrides: list[str]) -> None:
    """Makes a new run of the same directory out of an old one's checkpoint, with other settings. Raises ConfigError.

    What the algorithm remembers begins anew where its settings are others: the KL coefficient, the moments of the scores.
    """
    files = run_files(run)
    with files.claimed():
        checkpoint, before = checkpoint_at(files, which), load_config(files.config)
        config = load_config(files.config, [f"run.directory={files.root.parent}", *overrides, f"run.name={name}"])
        _check_models(before, config, checkpoint)
        _check_evaluations(before, config)
        _check_run(before, config, checkpoint)
        identity = Identity.new(config, _sizes(files))
        new = RunFiles(config.run_directory)
        with new.claimed():
            new.check_unused()
            new.clear()
            new.write_config(config.to_yaml())
            identity.write(new.identity)
            _copy_until(files, new, checkpoint.step)
            _copy_changes(before, config, files, new, checkpoint.step)
            target = new.checkpoints / checkpoint.path.name
            shutil.copytree(checkpoint.path, target)
            manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
            manifest |= {"run": config.run.name, "state": _state(before, config, checkpoint.state)}
            write_durably(target / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    console.print(
        f"{new.root}: begins at step {checkpoint.step} of {run}; {_how_to_go_on(new, config)}",
        highlight=False,
        soft_wrap=True,
    )


def _sizes(files: RunFiles) -> dict[Role, int]:
    """The micro-batches of the run that is branched off: its branch has the same, unless its config says otherwise."""
    parent = Identity.read(files.identity)
    if parent is None:
        raise ConfigError(f"run {files.identity}: is missing; put the file back, or start a new run")
    return {role: parent.micro_batch_tokens_of(role) for role in TRAINED_ROLES}


def _check_run(before: Config, config: Config, checkpoint: Checkpoint) -> None:
    """Raises ConfigError unless the branch is a run of its own that has steps to take, with data and models that are there."""
    if config.run.name == before.run.name and config.run_directory.resolve() == before.run_directory.resolve():
        raise ConfigError(f"--name {config.run.name}: is the name of the run to branch; give another")
    if config.run.steps <= checkpoint.step:
        raise ConfigError(
            f"run.steps {config.run.steps}: the branch begins after step {checkpoint.step}; expected more than that"
        )
    check_inputs(config)


def _check_models(before: Config, config: Config, checkpoint: Checkpoint) -> None:
    """Raises ConfigError unless the checkpoint's weights and optimizers can go on with this config."""
    if config.has_critic and not checkpoint.holds(Role.CRITIC):
        raise ConfigError(
            f"algorithm.estimator {config.algorithm.estimator}: needs a critic, and the checkpoint of step {checkpoint.step} has "
            "none; choose an estimator without a critic, or start a new run"
        )
    was, now = _trained_parts(before), _trained_parts(config)
    for key in now:
        if now[key] != was[key] and (config.has_critic or not key.startswith(Role.CRITIC)):
            raise ConfigError(
                f"{key} {now[key]}: the weights and optimizers of a checkpoint stay what they are, here those of {was[key]}; "
                "set it so, or start a new run"
            )


def _check_evaluations(before: Config, config: Config) -> None:
    """Raises ConfigError unless evaluations can be held against that before the first step, which a branch takes along."""
    if not config.evaluation.every_steps:
        return
    if not before.evaluation.every_steps:
        raise ConfigError(
            f"evaluation.every_steps {config.evaluation.every_steps}: evaluations are held against one before the first step, and the run to "
            "branch has none; leave it at 0, or start a new run"
        )
    was, now = (
        {"evaluation.max_prompts": given.evaluation.max_prompts, "data.validation": given.data.validation}
        for given in (before, config)
    )
    for key in now:
        if now[key] != was[key]:
            raise ConfigError(
                f"{key} {now[key]}: evaluations are held against one before the first step, here with {was[key]}; "
                "set it so, or start a new run"
            )


def _trained_parts(config: Config) -> dict[str, Any]:
    """The settings that say which weights are trained, by key."""
    found: dict[str, Any] = {"actor.model": config.actor.model, "critic.model": config.critic_model}
    for role, trained in ((Role.ACTOR, config.actor), (Role.CRITIC, config.critic)):
        found |= {f"{role}.freeze": trained.freeze, f"{role}.lora": trained.lora}
    return found


def _state(before: Config, config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """What the algorithm remembers in the branch. None, where it depends on a setting that is another now: it begins anew."""
    was, now = before.algorithm, config.algorithm
    found = dict(state)
    if (was.kl_coefficient, was.kl_controller) != (now.kl_coefficient, now.kl_controller):
        found["kl_controller"] = None
    # Moments are of the scores of one reward.
    if (was.score.normalize, before.reward) != (now.score.normalize, config.reward):
        found["score_moments"] = None
    return found


def _how_to_go_on(files: RunFiles, config: Config) -> str:
    url = redact_url(config.buffer.url or "")
    if is_redacted(url):
        return (
            f"quartet train {files.config} --resume --set buffer.url=URL goes on, where URL is {url} with its password: "
            "that is kept nowhere"
        )
    return f"quartet train {files.config} --resume goes on"


def _copy_until(old: RunFiles, new: RunFiles, step: int) -> None:
    """What the old run wrote down of the steps up to ``step``."""
    for source, target in (
        (old.metrics, new.metrics),
        (old.evaluation_summaries, new.evaluation_summaries),
        (old.alerts, new.alerts),
        (old.failed_trajectories, new.failed_trajectories),
        (old.timeline, new.timeline),
    ):
        if source.exists():
            shutil.copyfile(source, target)
    for source, target in ((old.trajectories, new.trajectories), (old.evaluations, new.evaluations)):
        if source.exists():
            shutil.copytree(source, target)
    new.forget_after(step)


def _copy_changes(before: Config, config: Config, old: RunFiles, new: RunFiles, step: int) -> None:
    """The changes up to ``step``, but those of a setting that the branch has another value for."""
    other = {
        f"{role}.learning_rate"
        for role, was, now in ((Role.ACTOR, before.actor, config.actor), (Role.CRITIC, before.critic, config.critic))
        if was.learning_rate != now.learning_rate
    }
    kept = [change for change in old.read_changes() if change["step"] <= step and change["setting"] not in other]
    if kept:
        new.append_changes(kept)


def checkpoint_at(files: RunFiles, which: str) -> Checkpoint:
    """The checkpoint of this step or name, every byte of it read. Raises ConfigError."""
    wanted = named_checkpoints(files).get(which)
    for path in checkpoint_folders(files):
        if path.name == wanted or (which.isdecimal() and step_of(path) == int(which)):
            try:
                return whole_checkpoint(path)
            except DamagedCheckpoint as damage:
                raise ConfigError(f"checkpoint {path}: {damage}; choose another step") from None
    what = f"of step {which}" if which.isdecimal() else f"named {which}"
    raise ConfigError(f"run {files.root}: no checkpoint {what}; {_known(files)}")


def _known(files: RunFiles) -> str:
    steps = ", ".join(str(step_of(path)) for path in checkpoint_folders(files)) or "none"
    names = ", ".join(named_checkpoints(files))
    return f"there are: {steps}" + (f"; names: {names}" if names else "")


def run_files(run: Path) -> RunFiles:
    """The files of a run, by its directory. Raises ConfigError."""
    files = RunFiles(run)
    if not files.is_a_run():
        raise ConfigError(f"run {run}: is not a run's directory; give one, such as runs/NAME")
    return files
