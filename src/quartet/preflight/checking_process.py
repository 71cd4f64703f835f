"""A process that checks something for a config, because this process must not import a user's code or slow libraries."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import IO

from quartet.system.child_processes import module_command, tied_to_parent
from quartet.system.secret_files import SECRET_VARIABLES


@contextlib.contextmanager
def checking_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[IO[bytes], subprocess.Popen[bytes]]]:
    """Start ``python -m module``, and yield a pipe with its result, and the process.

    The process is killed at the end, with the processes that it started.

    Its last argument is the descriptor to which it writes the result. It gets the environment of this process without secrets,
    and ``environment``.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        process = subprocess.Popen(
            tied_to_parent(module_command(module, *arguments, str(writer))),
            env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            yield pipe, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
