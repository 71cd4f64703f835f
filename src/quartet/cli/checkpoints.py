"""`quartet checkpoints`, `rollback` and `branch`: what a run has kept, under which names, and going on from there another way."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quartet.checkpoints import (
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    drop_checkpoint,
    named_checkpoints,
    read_checkpoint,
    step_of,
    whole_checkpoint,
)
from quartet.config import load_config
from quartet.errors import ConfigError
from quartet.files import write_durably
from quartet.telemetry.run_files import RunFiles

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
        checkpoint = checkpoint_at(files, which)
        step = checkpoint.step
        later = [path for path in checkpoint_folders(files) if step_of(path) > step]
        for given, folder in named_checkpoints(files).items():
            if folder in [path.name for path in later]:
                (files.checkpoints / given).unlink()
        for path in later:
            drop_checkpoint(path)
        for result in (files.policy, files.adapter):
            shutil.rmtree(result, ignore_errors=True)
        files.forget_after(step)
    console.print(
        f"{run}: is at step {step}; quartet train {files.config} --resume goes on", highlight=False, soft_wrap=True
    )


def branch(run: Path, which: str, name: str, overrides: list[str]) -> None:
    """Makes a new run of the same directory out of an old one's checkpoint, with other settings. Raises ConfigError."""
    files = run_files(run)
    with files.claimed():
        checkpoint = checkpoint_at(files, which)
        config = load_config(files.config, [f"run.name={name}", f"run.directory={files.root.parent}", *overrides])
        new = RunFiles(config.run_directory)
        with new.claimed():
            new.check_unused()
            new.write_config(config.to_yaml())
            _copy_until(files, new, checkpoint.step)
            target = new.checkpoints / checkpoint.path.name
            shutil.copytree(checkpoint.path, target)
            manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
            write_durably(target / MANIFEST, json.dumps({**manifest, "run": config.run.name}, indent=2) + "\n")
    console.print(
        f"{new.root}: begins at step {checkpoint.step} of {run}; quartet train {new.config} --resume goes on",
        highlight=False,
        soft_wrap=True,
    )


def _copy_until(old: RunFiles, new: RunFiles, step: int) -> None:
    """What the old run wrote down of the steps up to ``step``."""
    for source, target in (
        (old.metrics, new.metrics),
        (old.evaluation_summaries, new.evaluation_summaries),
        (old.alerts, new.alerts),
        (old.poison, new.poison),
    ):
        if source.exists():
            shutil.copyfile(source, target)
    for source, target in ((old.trajectories, new.trajectories), (old.evaluations, new.evaluations)):
        if source.exists():
            shutil.copytree(source, target)
    new.forget_after(step)


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
