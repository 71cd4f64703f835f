"""Module of user functions in the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

FUNCTIONS = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path


def echo(value):
    return value

def process(*_):
    return os.getpid()

def noisy(value):
    print("said on standard output")
    print("said on standard error", file=sys.stderr)
    os.write(1, b"written to descriptor 1\\n")
    subprocess.run(["echo", "said by a child"])
    return [value, sys.stdin.read()]

def flood(count):
    for _ in range(count):
        print("x" * 1023)
    return "done"

def fails(prompt, response="", fields=None):
    raise ValueError("bad\\n  luck")

def wrong_signature():
    return 1

def leaves(*_):
    sys.exit(4)

def sleeps(*_):
    Path("asleep").write_text(str(os.getpid()))
    time.sleep(60)

def dies(*_):
    os._exit(3)

def is_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_and_leaves_a_child(*_):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(5)

def starts_a_child(*_):
    child = subprocess.Popen(["sleep", "60"])
    return child.pid

def loaded(*_):
    return sorted(name for name in sys.modules if name.split(".")[0] in ("quartet", "torch", "transformers", "pydantic"))

def inherited(*_):
    # Descriptors that a child process would inherit, besides the standard streams. That of the listing is closed by now.
    there = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in there if number > 2 and os.path.exists(f"/dev/fd/{number}") and os.get_inheritable(number)]

def variable(name):
    return os.environ.get(name)

def numbers(_):
    import numpy as np

    return {"one": np.float32(0.5), "many": np.arange(3), "truth": np.bool_(True)}

def a_set(_):
    return {1}

def a_pipe_writer(descriptor):
    os.write(descriptor, b"gibberish\\n")
    return 1

def writes_and_waits(descriptor, line):
    if line is None:
        return 1
    os.write(descriptor, line.encode())
    time.sleep(60)

def forks(descriptor):
    child = os.fork()
    if child == 0:
        os.write(descriptor, b'{"number": 1, "result": "of the copy"}\\n')
        return "of the copy"
    os.waitpid(child, 0)
    return "of the function"

def huge(size):
    return "x" * size

not_a_function = 5
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make FUNCTIONS the module `functions` in the working directory, and return that directory."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path
