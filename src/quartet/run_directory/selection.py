"""The run, the checkpoint and the policy that a user names, and the rollback to a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.config.supervised import load_any_config
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    read_verified_checkpoint,
    roll_back,
    tag_best,
    tagged_checkpoints,
)
from quartet.run_directory.locking_and_removal import find_run, lock_run_directory
from quartet.run_directory.run_files import RunFiles

LATEST = "latest"
"""Name of the newest checkpoint of a run. No tag may have it."""


def run_files(run: Path) -> RunFiles:
    """Return the files of the run in this directory. Raises ConfigError if it is not a run."""
    files = RunFiles(run)
    if not files.is_run():
        raise ConfigError(f"run {run}: is not the directory of a run; expected a directory such as runs/NAME")
    return files


def check_no_stage(files: RunFiles, command: str) -> None:
    """Raise ConfigError if the run is a stage, for a ``command`` that needs a run of quartet train."""
    if stage := files.stage_name():
        raise ConfigError(f"{command} {files.root}: is a run of quartet {stage}; expected one of quartet train")


def checkpoint_at(files: RunFiles, which: str) -> Checkpoint:
    """Return the checkpoint of a step or tag, or the newest one for ``latest``, with every file verified. Raises ConfigError."""
    tagged = tagged_checkpoints(files).get(which)
    if which == LATEST:
        tagged = next((path.name for path in reversed(checkpoint_folders(files))), None)
    for path in checkpoint_folders(files):
        if path.name == tagged or (which.isdecimal() and checkpoint_step(path) == int(which)):
            try:
                return read_verified_checkpoint(path)
            except DamagedCheckpoint as damage:
                raise ConfigError(f"checkpoint {path}: {damage}; choose another checkpoint") from None
    if which == LATEST:
        raise ConfigError(f"run {files.root}: has no checkpoint yet")
    what = f"of step {which}" if which.isdecimal() else f"with the tag {which}"
    raise ConfigError(f"run {files.root}: no checkpoint {what}; {available_checkpoints(files)}")


def available_checkpoints(files: RunFiles) -> str:
    """Return the steps and tags of all checkpoints, for messages."""
    steps = ", ".join(str(checkpoint_step(path)) for path in checkpoint_folders(files)) or "none"
    tags = ", ".join(tagged_checkpoints(files))
    return f"available steps: {steps}" + (f"; tags: {tags}" if tags else "")


def roll_back_to(files: RunFiles, which: str) -> int:
    """Remove everything that a run recorded after the checkpoint of a step or tag, and return its step.

    Raises ConfigError, also if the run is active.
    """
    check_no_stage(files, "rollback")
    with lock_run_directory(files):
        step = checkpoint_at(files, which).step
        config = load_config(files.config)
        roll_back(files, step)
        tag_best(files, config.checkpoint)
    return step


def policy_in(directory: str) -> str:
    """Return the policy in the directory of a run or checkpoint. Anything else is returned unchanged.

    Raises ConfigError for a run that has not saved its policy yet, and for a reward model.
    """
    path = Path(directory)
    if (path / "manifest.json").is_file() and (path / "actor").is_dir():
        return str(path / "actor")
    files = RunFiles(path)
    if not files.is_run():
        return directory
    stage = files.stage_name()
    if stage == "reward-model":
        raise ConfigError(f"run {directory}: is a reward model; there is nothing to generate with")
    newest = [str(folder) for folder in checkpoint_folders(files)[-1:]]
    if not files.policy.is_dir():
        wait = "wait for its end" if stage else "wait for its first checkpoint or its end"
        remedy = f"give its newest checkpoint, {newest[0]}" if newest else wait
        raise ConfigError(f"run {directory}: has no saved policy, because it has not ended; {remedy}")
    saved, last = files.policy_step(), files.last_step()
    if saved is not None and saved < last:
        remedy = f"; its newest checkpoint is {newest[0]}" if newest else ""
        print(
            f"note: {files.policy} is the policy after step {saved}, the run is at step {last}{remedy}", file=sys.stderr
        )
    return str(files.policy)


def config_of_policy(directory: str) -> Config | None:
    """Return the config of the run in whose directory a policy is. None if it is not in one, or its config cannot be read."""
    # An id of the hub is no place, even if the working directory is inside a run.
    files = find_run(Path(directory) / "policy") if Path(directory).is_dir() else None
    if files is None:
        return None
    try:
        config = load_any_config(files.config)
        return config if isinstance(config, Config) else None
    except ConfigError as error:
        print(f"note: the run's data.chat_template_kwargs, tools and documents are not used: {error}", file=sys.stderr)
        return None
