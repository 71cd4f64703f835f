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
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def module_command(*module: str) -> list[str]:
    """The command line of ``python -m MODULE ARGUMENTS...``, with no place for files of the working directory."""
    return [sys.executable, "-P", "-m", *module]


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` tied to the process that starts it."""
    return module_command("quartet.processes", str(os.getpid()), *command)


def this_process() -> str:
    """A name of this process that no other has, on this machine since it started: empty where the system cannot tell."""
    return _identity(os.getpid()) or ""


def has_ended(process: str) -> bool:
    """Whether the process of this name has surely ended: it was one of this machine's, seen from the same namespace."""
    place, _, pid = process.rpartition("/")[0].rpartition("/")
    here = this_process().rpartition("/")[0].rpartition("/")[0]
    if not here or place != here or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # There is one, another user's.
    # Whoever may not look into /proc, or sees no others there (hidepid), does not know which process has the number now.
    found = _identity(int(pid))
    return found is not None and found != process


def _identity(pid: int) -> str | None:
    """boot/namespace/pid/start: numbers of processes are used again, and each container has its own.

    Empty for a process that has ended and is not yet reaped; None where the system cannot tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
        # The command stands in parentheses and may hold anything; the start is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A process that has ended and is not yet reaped does nothing any more.
    return "" if fields[0] in ("Z", "X") else f"{boot}/{namespace}/{pid}/{fields[19]}"


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
