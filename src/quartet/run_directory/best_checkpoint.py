"""The best checkpoint of a run by a metric: the tag ``best``, which the run sets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quartet.config.run import CheckpointConfig
from quartet.run_directory.checkpoints import (
    BEST,
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    read_checkpoint,
    tagged_checkpoints,
)
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.system.durable_files import fsync_path, storage_errors

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
