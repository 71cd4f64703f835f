"""The checkpoints of a run on disk: ``checkpoints/step-000020/``, each with a manifest of its files."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config.run import CheckpointConfig
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.system.durable_files import fsync_path, sha256, storage_errors

FORMAT = 1
"""Version of the manifest."""
MANIFEST = "manifest.json"
BEST = "best"
"""Tag of the best checkpoint by ``checkpoint.best_metric``. The run sets it, and a rollback may remove it."""
_FOLDER = re.compile(r"step-\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as described by its manifest. ``state`` is the orchestrator's.

    ``roles`` are the models that it must contain. ``files`` gives size in bytes and SHA-256 by path below ``path``: weights and
    optimizers. Everything else follows from ``step``: the position in the data and in the learning rate schedules, the random
    streams, the policy version, and the consumed trajectories, which are those of the steps up to it.
    """

    run: str
    step: int
    path: Path
    leader_epoch: int
    state: dict[str, Any]
    roles: tuple[str, ...]
    files: dict[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.files.values())

    def holds(self, role: str) -> bool:
        """Return whether the checkpoint contains files of this role's model."""
        return any(name.startswith(f"{role}/") for name in self.files)

    def problem(self) -> str | None:
        """Return the problem with the files, or None if all match the manifest. Reads every byte."""
        for role in self.roles:
            if not self.holds(role):
                return f"{MANIFEST} names no file of the {role}"
        for name, (size, digest) in self.files.items():
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size or sha256(file) != digest:
                return f"{name} does not match the manifest"
        return None


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be used. The message says why."""


def checkpoint_folders(files: RunFiles) -> list[Path]:
    """Return the folders of all checkpoints, oldest first."""
    folders = [path for path in files.checkpoints.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, by its folder."""
    return int(folder.name.removeprefix("step-"))


def tagged_checkpoints(files: RunFiles) -> dict[str, str]:
    """Return the folder of each tag. A tag is a link, such as ``best -> step-000020``."""
    if not files.checkpoints.is_dir():
        return {}
    links = [path for path in sorted(files.checkpoints.iterdir()) if path.is_symlink() and path.name[0] != "."]
    return {path.name: path.readlink().name for path in links}


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint atomically, unless it has been tagged. A tag never points to a deleted checkpoint."""
    files = RunFiles(folder.parents[1])
    # If this process ends before the deletion does, the start of the next checkpoint removes folders with such names.
    dropped = folder.with_name(f".{folder.name}.dropped.partial")
    folder.rename(dropped)
    if folder.name in tagged_checkpoints(files).values():
        dropped.rename(folder)
        return
    shutil.rmtree(dropped)


def rollback_target(files: RunFiles) -> int:
    """Return the step of the checkpoint that a user requested a rollback to, 0 for none."""
    try:
        return int(files.rolling_back.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def checkpoints_after(files: RunFiles, step: int) -> list[Path]:
    """Return the checkpoints that a rollback to ``step`` deletes. Raises ConfigError if a user has tagged one of them."""
    later = [path for path in checkpoint_folders(files) if checkpoint_step(path) > step]
    for name, folder in tagged_checkpoints(files).items():
        if name != BEST and folder in [path.name for path in later]:
            raise ConfigError(
                f"rollback to step {step}: {folder} is tagged {name}; remove the tag with quartet checkpoints untag "
                f"{files.root} {name} first, or fork"
            )
    return later


def roll_back(files: RunFiles, step: int) -> None:
    """Delete everything after a checkpoint's step: later checkpoints, changes, metrics, trajectories, the saved policy
    unless it is that of ``step``.

    The file ``rolling_back`` is removed last, so that a rollback that a crash interrupted is completed later. Raises ConfigError
    if a later checkpoint is tagged.
    """
    later = checkpoints_after(files, step)
    if tagged_checkpoints(files).get(BEST) in [path.name for path in later]:
        (files.checkpoints / BEST).unlink(missing_ok=True)
    for path in later:
        delete_checkpoint(path)
    # A policy that was saved at this very step stays.
    if files.policy_step() != step:
        files.policy_record.unlink(missing_ok=True)
        for result in (files.policy, files.adapter, files.policy_ema):
            shutil.rmtree(result, ignore_errors=True)
    # Before the steps that they belong to: otherwise a crash in between would apply them to recomputed steps.
    files.truncate_changes_after(step)
    files.truncate_after(step)
    files.rolling_back.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest, without checking its files. Raises DamagedCheckpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in manifest["files"].items()}
        checkpoint = Checkpoint(
            str(manifest["run"]),
            int(manifest["step"]),
            path,
            int(manifest["leader_epoch"]),
            dict(manifest["state"]),
            tuple(map(str, manifest["roles"])),
            files,
        )
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be used ({type(error).__name__})") from None
    if version != FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST} has format {version}, expected {FORMAT}")
    return checkpoint


def read_verified_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every file against the manifest. Raises DamagedCheckpoint."""
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem()
    if problem is not None:
        raise DamagedCheckpoint(problem)
    return checkpoint


EVALUATION_PREFIX = "eval_"
"""Start of the names of the metrics of evaluations."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the best ``value`` of the metric."""

    folder: str
    step: int
    value: float


def best_checkpoint(files: RunFiles, config: CheckpointConfig) -> BestCheckpoint | None:
    """Return the best of the existing checkpoints by ``config.best_metric``, the first of equal ones.

    Return None without a metric, and if no checkpoint has a finite value of it. Raises ConfigError if the metrics are damaged.
    """
    if config.best_metric is None:
        return None
    sign = 1 if config.best_mode == "max" else -1
    candidates = list(_candidates(files, config.best_metric))
    return max(candidates, key=lambda each: (sign * each.value, -each.step), default=None)


def tag_best(files: RunFiles, config: CheckpointConfig) -> BestCheckpoint | None:
    """Set the tag ``best`` to the best checkpoint, remove it if there is none, and return that checkpoint if the tag changed.

    Only files that survive a crash decide, so every process that calls this sets the same tag. Raises StorageFailed, and
    ConfigError if the metrics are damaged.
    """
    best = best_checkpoint(files, config)
    before = tagged_checkpoints(files).get(BEST)
    if before == (best.folder if best else None):
        return None
    with storage_errors(files.checkpoints):
        if best is None:
            (files.checkpoints / BEST).unlink(missing_ok=True)
        else:
            _replace_link(files.checkpoints / BEST, best.folder)
        fsync_path(files.checkpoints)
    return best


def has_value(files: RunFiles, metric: str, step: int) -> bool:
    """Return whether ``metric`` has a finite value in ``step``. Raises ConfigError if the metrics are damaged."""
    return step in _values(files, metric)


def _values(files: RunFiles, metric: str) -> dict[int, float]:
    """Return the finite values of the metric by step."""
    lines = read_step_lines(files.evaluation_summaries if metric.startswith(EVALUATION_PREFIX) else files.metrics)
    values = {line["step"]: line.get(metric) for line in lines}
    return {
        step: float(value) for step, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _candidates(files: RunFiles, metric: str) -> Iterator[BestCheckpoint]:
    values = _values(files, metric)
    for path in checkpoint_folders(files):
        step = checkpoint_step(path)
        if step not in values:
            continue
        try:
            read_checkpoint(path)
        except DamagedCheckpoint:
            continue
        yield BestCheckpoint(path.name, step, values[step])


def _replace_link(link: Path, target: str) -> None:
    # The name starts with a dot, so that a crash leaves no tag of another name.
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    os.replace(new, link)
