"""The saved policy in the directory of a run or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from quartet.errors import ConfigError
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
    if not files.policy.is_dir():
        raise ConfigError(
            f"run {directory}: has no saved policy, because it has not ended; give one of its checkpoints, such as "
            f"{files.checkpoints}/step-NNNNNN"
        )
    return str(files.policy)
