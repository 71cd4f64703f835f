"""Child processes that never outlive their parent.

`python -m quartet.processes COMMAND...` becomes COMMAND, and on Linux is killed by the kernel when its parent dies, even
by SIGKILL. Every process that Quartet starts is started through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` tied to the process that starts it."""
    return [sys.executable, "-m", "quartet.processes", str(os.getpid()), *command]


def _main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the kernel was told.
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
