"""A child process never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

from quartet.system.child_processes import has_ended, this_process, tied_spawns, tied_to_parent

# Starts a child, which prints its process id when its command runs, and waits. Both hold the pipe, so it closes when both have
# ended.
PARENT = """
import subprocess, time
from quartet.system.child_processes import tied_to_parent
child = subprocess.Popen(tied_to_parent(["sh", "-c", "echo $$; exec sleep 60"]), start_new_session=True)
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
    # The pipe closes shortly before the process ends.
    while is_running(child):
        assert time.monotonic() - start < 30


# Spawns a process that spawns another. Both print their process ids and wait.
SPAWNING = """
import multiprocessing, os, time
from quartet.system.child_processes import tied_spawns

def wait(depth):
    print(os.getpid(), flush=True)
    if depth:
        multiprocessing.get_context("spawn").Process(target=wait, args=(depth - 1,)).start()
    time.sleep(60)

if __name__ == "__main__":
    with tied_spawns():
        multiprocessing.get_context("spawn").Process(target=wait, args=(1,)).start()
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_processes_that_a_library_spawns_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        spawned = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        start = time.monotonic()
        while any(map(is_running, spawned)):
            assert time.monotonic() - start < 30


def test_spawns_are_tied_only_inside_the_block() -> None:
    before = spawn.get_command_line()
    with tied_spawns():
        assert f"begin_spawned({os.getpid()})" in str(spawn.get_command_line())
    assert spawn.get_command_line() == before


# Kills a process that it has started, and its child.
KILLING = """
import os, subprocess, sys
from quartet.system.child_processes import kill_descendants
child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.pid, child.stdout.readline(), flush=True)
kill_descendants()
child.wait()
print("alive", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_descendants_are_killed_in_every_session() -> None:
    result = subprocess.run([sys.executable, "-c", KILLING], capture_output=True, text=True, check=True)
    child, grandchild, alive = result.stdout.split()
    start = time.monotonic()
    while is_running(int(child)) or is_running(int(grandchild)):
        assert time.monotonic() - start < 30
    assert alive == "alive"


def is_running(process: int) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_keeps_its_process_id_arguments_and_status() -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1]); sys.exit(7)", "a b"]
    with subprocess.Popen(tied_to_parent(command), stdout=subprocess.PIPE, text=True) as child:
        output, _ = child.communicate()
        assert output.split(maxsplit=1) == [str(child.pid), "a b\n"]
        assert child.returncode == 7


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_child_of_a_dead_parent_does_not_start() -> None:
    command = [sys.executable, "-m", "quartet.system.child_processes", "1", sys.executable, "-c", "print('began')"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("", 1)


# Prints its name, then waits.
NAMED = "import sys; from quartet.system.child_processes import this_process; print(this_process(), flush=True); sys.stdin.read()"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start another process. Yield it and its name."""
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="processes have names on Linux only")
def test_a_dead_process_has_ended_even_before_it_is_reaped(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    assert not has_ended(name)
    assert not has_ended(this_process())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(name)
    process.wait()
    assert has_ended(name)


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_process_whose_id_was_reused_has_ended(other: tuple[subprocess.Popen[str], str]) -> None:
    namespace, _, start = other[1].rpartition("/")
    assert has_ended(f"{namespace}/{int(start) - 1}")
    assert not has_ended(f"another boot/{other[1].partition('/')[2]}")
    assert not has_ended("")


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_process_that_cannot_be_inspected_has_not_ended_while_its_id_exists(
    other: tuple[subprocess.Popen[str], str], error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, name = other
    real = Path.read_text

    def hidden(path: Path, *arguments: Any) -> str:
        # As with /proc mounted with hidepid, or for a process of another user.
        if str(path) == f"/proc/{process.pid}/stat":
            raise error(path)
        return real(path, *arguments)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert not has_ended(name)
    process.kill()
    process.wait()
    assert has_ended(name)


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_process_that_cannot_be_signalled_or_seen_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    name, real = this_process(), Path.read_text
    namespace = name.rpartition("/")[0].rpartition("/")[0]

    def refuse(*_: int) -> None:
        raise PermissionError

    def hidden(path: Path, *arguments: Any) -> str:
        if str(path) == "/proc/1/stat":
            raise FileNotFoundError(path)
        return real(path, *arguments)

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(Path, "read_text", hidden)
    assert not has_ended(f"{namespace}/1/7")
