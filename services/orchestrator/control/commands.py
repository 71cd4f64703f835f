"""What users ask of a run that goes on: checked here, so that they hear at once, and done between two steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest
from quartet.run_directory.checkpoints import checkpoint_folders, checkpoints_after, step_of
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.live_settings import Change, Changes, Setting
from quartet.services.orchestrator.control.run_control import Control


class Commands:
    """Thread-safe: any number of callers."""

    def __init__(self, control: Control, changes: Changes, files: RunFiles) -> None:
        self._control, self._changes, self._files = control, changes, files
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop after the step in hand."""
        self._control.stop()

    def pause(self) -> None:
        """Wait after the step in hand."""
        self._control.pause()

    def resume(self) -> None:
        """Go on."""
        self._control.resume()

    def checkpoint(self) -> None:
        """Save a checkpoint after the step in hand."""
        self._control.checkpoint()

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of ``step`` after the step in hand. Raises InvalidRequest, FailedPrecondition."""
        steps = [step_of(folder) for folder in checkpoint_folders(self._files)]
        if step not in steps:
            raise InvalidRequest(f"step {step}: has no checkpoint; there are: {', '.join(map(str, steps)) or 'none'}")
        try:
            checkpoints_after(self._files, step)
        except ConfigError as error:
            raise FailedPrecondition(str(error)) from None
        with self._lock:
            self._control.roll_back(step)

    def settings(self) -> list[Setting]:
        """What can be changed while the run goes on."""
        return self._changes.settings()

    def change(self, values: Mapping[str, float], user: str) -> list[Change]:
        """Changes settings. Raises InvalidRequest, FailedPrecondition, StorageFailed."""
        with self._lock:
            if step := self._control.going_back_to:
                raise FailedPrecondition(
                    f"settings: the run is going back to step {step}; change them when it is there"
                )
            return self._changes.change(values, user)
