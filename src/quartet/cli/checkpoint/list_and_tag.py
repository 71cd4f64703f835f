"""`quartet checkpoints list|verify|tag|untag` and `quartet rollback`."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quartet.config import Config, is_redacted, load_config, redact_url
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import (
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    read_checkpoint,
    read_verified_checkpoint,
    tagged_checkpoints,
)
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import available_checkpoints, checkpoint_at, roll_back_to, run_files

console = Console()

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def list_checkpoints(run: Path, verify: bool) -> bool:
    """Print the checkpoints of a run, and return whether all are usable.

    With ``verify``, every file is compared with its checksum. Raises ConfigError if ``run`` is not a run.
    """
    files = run_files(run)
    folders, tagged = checkpoint_folders(files), tagged_checkpoints(files)
    table = Table("step", "tag", "size", "leader epoch", "state", title=f"checkpoints of {run}")
    usable = True
    for path in folders:
        tags = ", ".join(tag for tag, folder in tagged.items() if folder == path.name)
        try:
            checkpoint = read_verified_checkpoint(path) if verify else read_checkpoint(path)
            size, epoch = f"{checkpoint.bytes / 2**20:.1f} MiB", str(checkpoint.leader_epoch)
            table.add_row(str(checkpoint.step), tags, size, epoch, "verified" if verify else "not verified")
        except DamagedCheckpoint as damage:
            usable = False
            table.add_row(str(checkpoint_step(path)), tags, "", "", f"damaged: {damage}")
    if folders:
        console.print(table)
    else:
        console.print(f"{run}: no checkpoints yet", highlight=False)
    return usable


def tag_checkpoint(run: Path, which: str, tag: str) -> None:
    """Tag a checkpoint, so that it is kept until it is untagged. The run may be active. Raises ConfigError."""
    files = run_files(run)
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
        highlight=False,
        soft_wrap=True,
    )


def untag_checkpoint(run: Path, tag: str) -> None:
    """Remove a tag. The checkpoint is deleted once it is no longer one of the latest. Raises ConfigError."""
    files = run_files(run)
    if tag not in tagged_checkpoints(files):
        raise ConfigError(f"run {files.root}: no checkpoint has the tag {tag}; {available_checkpoints(files)}")
    (files.checkpoints / tag).unlink(missing_ok=True)
    console.print(f"{run}: tag {tag} is removed", highlight=False, soft_wrap=True)


def rollback(run: Path, which: str) -> None:
    """Remove everything that a run recorded after a checkpoint. Raises ConfigError, also if the run is active."""
    files = run_files(run)
    config = load_config(files.config)
    step = roll_back_to(files, which)
    console.print(
        f"{run}: is back at step {step}; metrics, trajectories and checkpoints after it and the saved policy are removed; "
        f"{how_to_resume(files, config)}",
        highlight=False,
        soft_wrap=True,
    )


def how_to_resume(files: RunFiles, config: Config) -> str:
    """Return the command that resumes a run, as a message for the user."""
    url = redact_url(config.buffer.url or "")
    if is_redacted(url):
        return (
            f"quartet train {files.config} --resume --set buffer.url=URL resumes it; URL is {url} with its password, "
            "which is not stored"
        )
    return f"quartet train {files.config} --resume resumes it"
