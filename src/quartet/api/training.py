"""``quartet.train``."""

from __future__ import annotations

import os

from quartet.api.configs import ConfigSource, Overrides, load_config
from quartet.api.run import Run
from quartet.launcher.background_run import BackgroundRun
from quartet.preflight import nothing_to_resume
from quartet.run_directory.run_files import RunFiles


def train(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Train a policy as `quartet train` does, and return the run.

    Starts the services that have no address in the config, and stops them at the end. ``overwrite`` replaces an earlier run of
    the same name, ``resume`` continues it, and returns at once if it is finished. With ``wait``, returns when the run has ended,
    and prints about 20 lines of ``progress``; an interrupt stops the run. Without ``wait``, returns when the input is checked:
    the run continues in the background, and ``Run.wait`` waits for it. A run ends with this process; ``resume`` continues it
    later.

    Raises ConfigError for invalid input, and the error that ends the run early.
    """
    # gRPC logs every connection that a service closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    loaded = load_config(config, overrides)
    if resume and not overwrite and nothing_to_resume(loaded, RunFiles(loaded.run_directory)):
        return Run(loaded.run_directory)
    active = BackgroundRun(loaded, overwrite, resume)
    run = Run(loaded.run_directory, active)
    if wait:
        try:
            run.wait(progress=progress)
        except KeyboardInterrupt:
            active.interrupt()
            run.wait(progress=progress)
            raise
    return run
