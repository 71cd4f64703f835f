"""`quartet checkpoints`, `rollback` and `branch`: what a run has kept, and going on from there another way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quartet.checkpoints import (
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    read_checkpoint,
    whole_checkpoint,
)
from quartet.config import load_config
from quartet.errors import ConfigError
from quartet.files import write_durably
from quartet.telemetry.run_files import RunFiles

console = Console()


def show(run: Path, verify: bool) -> bool:
    """Prints a run's checkpoints; with ``verify`` reads every byte. Gives whether all can be used. Raises ConfigError."""
    folders = checkpoint_folders(_files_of(run))
    table = Table("step", "size", "leader epoch", "state", title=f"checkpoints of {run}")
    fine = True
    for path in folders:
        try:
            found = whole_checkpoint(path) if verify else read_checkpoint(path)
            size = f"{found.bytes / 2**20:.1f} MiB"
            table.add_row(str(found.step), size, str(found.leader_epoch), "whole" if verify else "not verified")
        except DamagedCheckpoint as damage:
            fine = False
            table.add_row(path.name.removeprefix("step-").lstrip("0"), "", "", f"damaged: {damage}")
    if folders:
        console.print(table)
    else:
        console.print(f"{run}: no checkpoints yet", highlight=False)
    return fine


def rollback(run: Path, step: int) -> None:
    """Forgets what came after a checkpoint; ``quartet train --resume`` goes on from there. Raises ConfigError."""
    files = _files_of(run)
    with files.claimed():
        checkpoint = _checkpoint_at(files, step)
        for path in checkpoint_folders(files):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        for later in (files.policy, files.adapter):
            shutil.rmtree(later, ignore_errors=True)
        files.forget_after(checkpoint.step)
    console.print(
        f"{run}: is at step {step}; quartet train {files.config} --resume goes on", highlight=False, soft_wrap=True
    )


def branch(run: Path, step: int, name: str, overrides: list[str]) -> None:
    """Makes a new run of the same directory out of an old one's checkpoint, with other settings. Raises ConfigError."""
    files = _files_of(run)
    with files.claimed():
        checkpoint = _checkpoint_at(files, step)
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
        f"{new.root}: begins at step {step} of {run}; quartet train {new.config} --resume goes on",
        highlight=False,
        soft_wrap=True,
    )


def _copy_until(old: RunFiles, new: RunFiles, step: int) -> None:
    """What the old run wrote down of the steps up to ``step``."""
    for source, target in (
        (old.metrics, new.metrics),
        (old.evaluation_summaries, new.evaluation_summaries),
        (old.alerts, new.alerts),
    ):
        if source.exists():
            shutil.copyfile(source, target)
    for source, target in ((old.trajectories, new.trajectories), (old.evaluations, new.evaluations)):
        if source.exists():
            shutil.copytree(source, target)
    new.forget_after(step)


def _checkpoint_at(files: RunFiles, step: int) -> Checkpoint:
    for path in checkpoint_folders(files):
        if int(path.name.removeprefix("step-")) == step:
            try:
                return whole_checkpoint(path)
            except DamagedCheckpoint as damage:
                raise ConfigError(f"checkpoint {path}: {damage}; choose another step") from None
    kept = ", ".join(str(int(path.name.removeprefix("step-"))) for path in checkpoint_folders(files)) or "none"
    raise ConfigError(f"run {files.root}: no checkpoint of step {step}; there are: {kept}")


def _files_of(run: Path) -> RunFiles:
    files = RunFiles(run)
    if not files.is_a_run():
        raise ConfigError(f"run {run}: is not a run's directory; give one, such as runs/NAME")
    return files
