"""A child never outlives its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from quartet.processes import with_parent

# Starts a child, which says its process id once it is the command and no more on its way to become it, and waits. The pipe
# that both hold ends with the last of them.
PARENT = """
import subprocess, time
from quartet.processes import with_parent
child = subprocess.Popen(with_parent(["sh", "-c", "echo $$; exec sleep 60"]), start_new_session=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(number)
        start = time.monotonic()
        assert parent.stdout.read() == ""
        assert time.monotonic() - start < 30
    # The pipe is closed a moment before the process is gone.
    while is_running(child):
        assert time.monotonic() - start < 30


def is_running(process: int) -> bool:
    """Whether it runs; one that has ended and waits for an adoptive parent to notice does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_keeps_its_process_id_arguments_and_status() -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1]); sys.exit(7)", "a b"]
    with subprocess.Popen(with_parent(command), stdout=subprocess.PIPE, text=True) as child:
        said, _ = child.communicate()
        assert said.split(maxsplit=1) == [str(child.pid), "a b\n"]
        assert child.returncode == 7


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, "-m", "quartet.processes", "1", sys.executable, "-c", "print('began')"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("", 1)
