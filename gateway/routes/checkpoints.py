"""Checkpoints of a run, by their manifests."""

from __future__ import annotations

from pathlib import Path

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.routes.dependencies import Cursor, Limit, TheRunFiles
from quartet.gateway.schemas import CheckpointInfo, Page
from quartet.run_directory.checkpoints import (
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    read_checkpoint,
    tagged_checkpoints,
)

router = api_router("checkpoints")


@router.get("/runs/{run}/checkpoints")
def list_checkpoints(_: Viewer, files: TheRunFiles, limit: Limit = 50, cursor: Cursor = None) -> Page[CheckpointInfo]:
    """List the checkpoints, newest first. `quartet checkpoints verify` checks their contents too."""
    request = ["checkpoints", files.root.name]
    folders = checkpoint_folders(files)[::-1]
    remaining = folders
    if cursor is not None:
        before = int(read_cursor(cursor, request, (int,))[0])
        remaining = [folder for folder in folders if checkpoint_step(folder) < before]
    tags = tagged_checkpoints(files)
    items = [
        _info(folder, sorted(tag for tag, tagged in tags.items() if tagged == folder.name))
        for folder in remaining[:limit]
    ]
    return Page(
        items=items,
        total=len(folders),
        next=cursor_after([items[-1].step], request) if len(remaining) > limit else None,
    )


def _info(folder: Path, tags: list[str]) -> CheckpointInfo:
    size, problem = 0, None
    try:
        checkpoint = read_checkpoint(folder)
        size = checkpoint.bytes
        missing = (role for role in checkpoint.roles if not checkpoint.holds(role))
        problem = next((f"{MANIFEST} lists no file of the {role}" for role in missing), None) or _wrong_size(checkpoint)
    except DamagedCheckpoint as error:
        problem = str(error)
    try:
        created = (folder / MANIFEST).stat().st_mtime
    except OSError:
        created = 0.0
    return CheckpointInfo(step=checkpoint_step(folder), tags=tags, created=created, bytes=size, problem=problem)


def _wrong_size(checkpoint: Checkpoint) -> str | None:
    """Return which file is missing or has the wrong size, or None."""
    for name, (expected, _) in checkpoint.files.items():
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected:
            return f"{name} has {size} bytes, expected {expected}"
    return None
