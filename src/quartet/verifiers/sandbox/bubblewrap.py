"""Sandbox with bubblewrap (bwrap): user, PID, network, IPC, mount and UTS namespaces, without root."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox.process import END_SECONDS, MEBIBYTE, START_SCRIPT, Identity, Limits, SandboxProcess
from quartet.verifiers.sandbox.seccomp import filter_program

UNPRIVILEGED = 65534
"""User and group of the program. As root, bwrap itself runs as this user, too."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108


class Bubblewrap:
    """Runs programs with bwrap. See ``Sandbox``."""

    def __init__(self, python: str) -> None:
        """Use the interpreter ``python``, a path on this machine. Raises SandboxFailed without bwrap."""
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxFailed("bubblewrap: no bwrap in PATH; install the package bubblewrap")
        self._filter = filter_program()
        self._identity = Identity(UNPRIVILEGED, UNPRIVILEGED) if os.geteuid() == 0 else None
        self._command = [program, *_arguments(python)]
        self._python = [python, "-I", "-S", "-B", "-c", START_SCRIPT, "count-processes"]
        self.name = f"bubblewrap with {python}"

    def launch(self, limits: Limits) -> SandboxProcess:
        """Start bwrap with the start script. Raises SandboxFailed."""
        information, written = os.pipe()
        descriptors = [written]
        command = [*self._command, "--size", str(limits.files_mb * MEBIBYTE), "--tmpfs", "/tmp"]  # noqa: S108
        command += ["--remount-ro", "/", "--chdir", "/tmp", "--info-fd", str(written)]  # noqa: S108
        try:
            if self._filter:
                readable, writable = os.pipe()
                descriptors.append(readable)
                os.write(writable, self._filter)
                os.close(writable)
                command += ["--seccomp", str(readable)]
            return SandboxProcess(
                self.name,
                [*command, "--", *self._python],
                kill=lambda process: _kill(process, information),
                max_output_bytes=limits.output_bytes,
                identity=self._identity,
                inherited=descriptors,
                on_close=lambda: os.close(information),
            )
        except BaseException:
            os.close(information)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _arguments(python: str) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(UNPRIVILEGED), "--gid", str(UNPRIVILEGED), "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    prefix = Path(python).parents[1]
    if not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    return arguments


def _kill(process: subprocess.Popen[bytes], information: int) -> None:
    """Kill the first process of the sandbox. The kernel then kills all others, before bwrap sees its end.

    So nothing is left once bwrap has ended. Killing bwrap itself would leave a first process that does not yet end with it.
    """
    first = _first_process(information)
    if first is None:
        process.kill()
        return
    try:
        descriptor = os.pidfd_open(first)
    except OSError:  # It has ended, and so will bwrap.
        return
    try:
        # Its number may belong to another process by now. The descriptor keeps its meaning.
        if _parent(first) == process.pid:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _first_process(information: int) -> int | None:
    """Wait until bwrap has reported its first process, and return its id, or None if bwrap ended before that."""
    content, deadline = b"", time.monotonic() + END_SECONDS
    poller = select.poll()
    poller.register(information, select.POLLIN)
    while not content.rstrip().endswith(b"}") and poller.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(information, 4096)
        if not part:
            break
        content += part
    try:
        return int(json.loads(content)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None


def _parent(process: int) -> int:
    # The command is in parentheses and may contain any character. The parent is the 2nd field after it.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def candidate_interpreters() -> list[str]:
    """Return the interpreters to try, best first: that of this process without its virtual environment, then the system's."""
    own = os.path.realpath(sys.executable)
    others = [os.path.realpath(path) for path in ("/usr/local/bin/python3", "/usr/bin/python3")]
    return list(dict.fromkeys([own, *(path for path in others if os.path.exists(path))]))
