"""The saved policy in the directory of a run or of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import checkpoint_folders
from quartet.run_directory.locking_and_removal import find_run
from quartet.run_directory.run_files import RunFiles


def policy_in(directory: str) -> str:
    """Return the policy in the directory of a run or checkpoint. Anything else is returned unchanged.

    Raises ConfigError for a run that has not saved its policy yet.
    """
    path = Path(directory)
    if (path / "manifest.json").is_file() and (path / "actor").is_dir():
        return str(path / "actor")
    files = RunFiles(path)
    if not files.is_run():
        return directory
    newest = [str(folder) for folder in checkpoint_folders(files)[-1:]]
    if not files.policy.is_dir():
        remedy = f"give its newest checkpoint, {newest[0]}" if newest else "wait for its first checkpoint or its end"
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
        return load_config(files.config)
    except ConfigError as error:
        print(f"note: the run's data.chat_template_kwargs, tools and documents are not used: {error}", file=sys.stderr)
        return None
