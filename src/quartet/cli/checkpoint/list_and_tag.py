"""`quartet checkpoints list|verify|tag|untag` and `quartet rollback`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import typer
from rich.table import Table

from quartet.cli.console import make_console
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.config.url_redaction import is_redacted, redact_url
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import (
    BEST,
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    checkpoints_after,
    read_checkpoint,
    read_verified_checkpoint,
    roll_back,
    tag_best,
    tagged_checkpoints,
)
from quartet.run_directory.locking_and_removal import lock_run_directory
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import LATEST, available_checkpoints, check_no_stage, checkpoint_at, run_files

console = make_console()

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def list_checkpoints(run: Path, verify: bool) -> bool:
    """Print the checkpoints of a run, and return whether all are usable.

    With ``verify``, every file is compared with its checksum. Raises ConfigError if ``run`` is not a run.
    """
    files = run_files(run)
    folders, tagged = checkpoint_folders(files), tagged_checkpoints(files)
    table = Table("step", "tag", "size", "state", title=f"checkpoints of {run}")
    usable = True
    for path in folders:
        tags = ", ".join(tag for tag, folder in tagged.items() if folder == path.name)
        try:
            checkpoint = read_verified_checkpoint(path) if verify else read_checkpoint(path)
            size = f"{checkpoint.bytes / 2**20:.1f} MiB"
            table.add_row(str(checkpoint.step), tags, size, "verified" if verify else "not verified")
        except DamagedCheckpoint as damage:
            usable = False
            table.add_row(str(checkpoint_step(path)), tags, "", f"damaged: {damage}")
    if folders:
        console.print(table)
    else:
        console.print(f"{run}: no checkpoints yet")
    return usable


def tag_checkpoint(run: Path, which: str, tag: str) -> None:
    """Tag a checkpoint, so that it is kept until it is untagged. The run may be active. Raises ConfigError."""
    files = run_files(run)
    if tag == LATEST:
        raise ConfigError(f"tag {tag}: names the newest checkpoint of every run; choose another tag")
    if tag == BEST:
        raise ConfigError(f"tag {tag}: the run sets it by checkpoint.best_metric; choose another tag")
    if not _TAG.fullmatch(tag) or tag.startswith("step-") or tag.isdecimal():
        raise ConfigError(
            f"tag {tag!r}: expected up to 64 letters, digits, '.', '_' and '-'; not only digits, and not step-..."
        )
    folder = checkpoint_at(files, which).path
    link = files.checkpoints / tag
    try:
        link.symlink_to(folder.name)
    except FileExistsError:
        owner = tagged_checkpoints(files).get(tag)
        if owner == folder.name:
            return
        if owner is None:
            raise ConfigError(f"tag {tag}: {link} is not a tag; choose another tag, or remove that file") from None
        raise ConfigError(
            f"tag {tag}: belongs to {owner}; remove it there first with quartet checkpoints untag {run} {tag}"
        ) from None
    # An active run may have deleted the checkpoint in the meantime.
    if not folder.is_dir():
        link.unlink(missing_ok=True)
        raise ConfigError(f"checkpoint {folder}: the run has just deleted it; choose another checkpoint")
    console.print(
        f"{run}: checkpoint of step {checkpoint_step(folder)} is tagged {tag} and is kept",
        soft_wrap=True,
    )


def untag_checkpoint(run: Path, tag: str) -> None:
    """Remove a tag. The checkpoint is deleted once it is no longer one of the latest. Raises ConfigError."""
    files = run_files(run)
    if tag not in tagged_checkpoints(files):
        raise ConfigError(f"run {files.root}: no checkpoint has the tag {tag}; {available_checkpoints(files)}")
    (files.checkpoints / tag).unlink(missing_ok=True)
    console.print(f"{run}: tag {tag} is removed", soft_wrap=True)


def rollback(run: Path, which: str, yes: bool = False) -> None:
    """Remove everything that a run recorded after a checkpoint, after a question to the user unless ``yes``.

    Raises ConfigError, also if the run is active, or if there is no terminal to ask on. Raises typer.Abort if the user declines.
    """
    files = run_files(run)
    check_no_stage(files, "rollback")
    with lock_run_directory(files):
        config, step = load_config(files.config), checkpoint_at(files, which).step
        if (removed := _removed_by_rollback(files, step)) and not yes:
            _ask_before_removal(run, step, removed)
        roll_back(files, step)
        tag_best(files, config.checkpoint)
    outcome = f"is back at step {step}" if removed else f"is at step {step} already, nothing was removed"
    console.print(f"{run}: {outcome}; {how_to_resume(files, config)}", soft_wrap=True)


def _removed_by_rollback(files: RunFiles, step: int) -> list[str]:
    """Return what a rollback to ``step`` removes, one line each. Raises ConfigError if a later checkpoint is tagged."""
    last, checkpoints = files.last_step(), [str(checkpoint_step(path)) for path in checkpoints_after(files, step)]
    changes = sum(change["step"] > step for change in files.read_changes())
    removed = []
    if last > step:
        steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
        removed.append(f"{steps}, with metrics, trajectories and evaluations")
    if checkpoints:
        removed.append(
            f"checkpoints of steps {', '.join(checkpoints)}"
            if checkpoints[1:]
            else f"checkpoint of step {checkpoints[0]}"
        )
    if changes:
        removed.append(f"setting changes from later steps on: {changes}")
    if files.policy.is_dir() and (saved := files.policy_step()) != step:
        removed.append(f"the saved policy, of step {saved}" if saved else "the saved policy")
    return removed


def _ask_before_removal(run: Path, step: int, removed: list[str]) -> None:
    """Show what is removed and ask. Raises ConfigError without a terminal, and typer.Abort if the answer is no."""
    listed = "".join(f"\n  {line}" for line in removed)
    if not _is_interactive():
        raise ConfigError(
            f"rollback of {run} to step {step} removes:{listed}\nthere is no terminal to ask on; give --yes to remove them"
        )
    console.print(f"{run}: a rollback to step {step} removes:{listed}", soft_wrap=True)
    typer.confirm("remove them?", abort=True)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def how_to_resume(files: RunFiles, config: Config) -> str:
    """Return the command that resumes a run, as a message for the user."""
    url = redact_url(config.buffer.url or "")
    if is_redacted(url):
        return (
            f"quartet train {files.config} --resume --set buffer.url=URL resumes it; URL is {url} with its password, "
            "which is not stored"
        )
    return f"quartet train {files.config} --resume resumes it"
