"""First code inside the sandbox: set the limits, then run what standard input says.

Standard input begins with the length of a header (10 digits) and the header, lines of a key and a number:

- the limits by name, see ``quartet.verifiers.sandbox.process``;
- ``name``, ``source``, ``script``, ``more``, ``command``: the lengths of texts in bytes. The texts follow the header in this
  order.

``source`` is a Python program to run in this process. If there is a ``command`` (words with NUL between them), the source is
written to a file ``name``, and the command is executed with the file's path in the place of {file}. If there is a ``script``
of Quartet, it runs in the place of the source and gets ``request``, a dict with the texts.

The argument count-processes sets the limit of processes, too. The rest of standard input is for the program. Standard output
begins with the line "started" once the limits hold. So a program that fails can be told from a sandbox that fails. The script
imports little, because every test waits for it.
"""

from __future__ import annotations

import os
import sys

STARTED = b"started\n"
TEXTS = ("name", "source", "script", "more", "command")


def _read(size: int) -> bytes:
    """Read exactly ``size`` bytes. Reads no byte that is for the program."""
    content = b""
    while len(content) < size:
        part = os.read(0, size - len(content))
        if not part:
            sys.exit("the sandbox got no program")
        content += part
    return content


def _set_limits(limits: dict[str, int]) -> None:
    import resource

    cpu = limits["cpu_seconds"]
    file_bytes = limits["files_mb"] * 2**20
    values = {
        # Above the soft limit a process gets SIGXCPU, which it may ignore, and above the hard limit SIGKILL.
        "RLIMIT_CPU": (cpu, cpu + 1),
        "RLIMIT_AS": (limits["memory_mb"] * 2**20,) * 2,
        "RLIMIT_FSIZE": (file_bytes, file_bytes),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_SIGPENDING": (64, 64),
    }
    # Without a user namespace the kernel counts the processes of this user in all sandboxes. A container has a limit in its
    # cgroup.
    if "count-processes" in sys.argv:
        # The first process of the sandbox counts, too.
        values["RLIMIT_NPROC"] = (limits["processes"] + 1,) * 2
    for name, value in values.items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), value)


def _main() -> None:
    header = dict(line.split() for line in _read(int(_read(10))).decode().splitlines())
    numbers = {name: int(value) for name, value in header.items()}
    request = {name: _read(numbers[name]).decode(errors="surrogatepass") for name in TEXTS}
    _set_limits(numbers)
    path = "/tmp/" + request["name"]  # noqa: S108 - the sandbox has no other folder that can be written to
    if request["command"]:
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["source"])
        command = [word.replace("{file}", path) for word in request["command"].split("\0")]
        os.write(1, STARTED)
        os.execvp(command[0], command)
    os.write(1, STARTED)
    main = sys.modules["__main__"].__dict__
    sys.argv[:] = [path]
    # The program gets a namespace without the names of this script.
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main["__file__"] = path
    if request["script"]:
        main["request"] = request
    exec(compile(request["script"] or request["source"], path, "exec"), main)  # noqa: S102 - this process exists to run it


if __name__ == "__main__":
    _main()
