"""Child processes that never outlive their parent.

`python -m quartet.system.child_processes PARENT COMMAND...` executes COMMAND. On Linux the kernel kills it when its parent
dies, even by SIGKILL. Quartet starts every process through it, except the services that a fork server starts. ``tied_spawns``
does the same for the processes of a library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def module_command(*module: str, python: Path | None = None) -> list[str]:
    """Return the command line of ``python -m MODULE ARGUMENTS...`` that does not import from the working directory.

    ``python`` is the interpreter. Defaults to that of this process.
    """
    return [str(python or sys.executable), "-P", "-m", *module]


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` and ends it with the calling process."""
    return module_command("quartet.system.child_processes", str(os.getpid()), *command)


@contextmanager
def tied_spawns() -> Iterator[None]:
    """Let the processes that ``multiprocessing`` spawns inside this block end with this process, and theirs with them.

    For a library that starts its processes itself. The thread that spawns must live as long as they do: the kernel takes its end
    for that of the parent. Processes that are forked are not tied.
    """
    from multiprocessing import spawn  # Every child process imports this module, and few need this.

    original = spawn.get_command_line
    _tie_spawns()
    try:
        yield
    finally:
        spawn.get_command_line = original


def _tie_spawns() -> None:
    from multiprocessing import spawn

    original = spawn.get_command_line

    def tied_command_line(**arguments: object) -> list[str]:
        command = original(**arguments)
        program = command.index("-c") + 1
        command[program] = f"from {__name__} import begin_spawned; begin_spawned({os.getpid()}); {command[program]}"
        return command

    spawn.get_command_line = tied_command_line


def begin_spawned(parent: int) -> None:
    """Tie this process to ``parent``, and the processes that it spawns to itself. See ``tied_spawns``."""
    die_with(parent)
    _tie_spawns()


def kill_descendants() -> None:
    """Kill the child processes of this process, and theirs. Only on Linux."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command is in parentheses and may contain any character. The parent is the 2nd field after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    remaining = children.get(os.getpid(), [])
    while remaining:
        process = remaining.pop()
        remaining += children.get(process, [])
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def package_path() -> Iterator[str]:
    """Yield a folder for the PYTHONPATH of another environment. It contains only Quartet and its entry points.

    The folder in which Quartet is installed may contain torch and other packages, which would hide those of the environment.
    """
    # Every child process imports this module, and few need these.
    from importlib.metadata import PackageNotFoundError, distribution
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="quartet-") as folder:
        package = Path(__file__).resolve().parents[1]
        (Path(folder) / package.name).symlink_to(package, target_is_directory=True)
        with suppress(PackageNotFoundError):
            installed = distribution("quartet-rlhf")
            metadata = Path(folder) / f"quartet_rlhf-{installed.version}.dist-info"
            metadata.mkdir()
            for name in ("METADATA", "entry_points.txt"):
                (metadata / name).write_text(installed.read_text(name) or "", encoding="utf-8")
        yield folder


def this_process() -> str:
    """Return a name that is unique to this process since the machine's boot, or "" if the system provides none."""
    return _identity(os.getpid()) or ""


def has_ended(process: str) -> bool:
    """Return whether the process with this name has certainly ended. Processes of other machines or namespaces: False."""
    namespace, _, pid = process.rpartition("/")[0].rpartition("/")
    own_namespace = this_process().rpartition("/")[0].rpartition("/")[0]
    if not own_namespace or namespace != own_namespace or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # A process of another user has this id.
    # Without access to /proc, or with hidepid, it is unknown which process has the id now.
    current = _identity(int(pid))
    return current is not None and current != process


def _identity(pid: int) -> str | None:
    """Return boot/namespace/pid/start time. Process ids are reused, and each container has its own.

    Return "" for a process that has ended and is not reaped, None if the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
        # The command is in parentheses and may contain any character. The start time is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # States Z and X: the process has ended and is not reaped.
    return "" if fields[0] in ("Z", "X") else f"{boot}/{namespace}/{pid}/{fields[19]}"


STOPPED = " (its process is stopped)"
"""State of a process that a signal has stopped, see ``process_state``."""


def process_state(pid: int) -> str:
    """Return why the kernel keeps a process from running, such as " (its process is stopped)", or "" if it does not."""
    try:
        # The command is in parentheses and may contain any character.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    reasons = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a device"}
    return f" (its process {reasons[state]})" if state in reasons else ""


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent process ``parent`` dies. Exit if it has died. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before prctl was called.
        if os.getppid() != parent:
            sys.exit(1)


def _main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    die_with(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
