"""Hostile programs in the sandbox: each is contained, none passes, and nothing is left of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quartet.verifiers.programs import InputOutput, Kind, Program, run_with_calls, run_with_input
from quartet.verifiers.sandbox.process import Limits, Sandbox
from tests.verifiers.conftest import MARKER, files, leftovers, mounts
from tests.verifiers.hostile_programs import ATTACKS, CHEATS, LIMITED

LIMITS = Limits(seconds=1.0, cpu_seconds=1, memory_mb=400)
PATIENT = Limits(seconds=30.0, cpu_seconds=30, memory_mb=400)
"""Limits of time that no attack reaches, however busy the machine is."""


SLOW_LIMITED = set(LIMITED) - {"fork bomb", "sleep", "memory", "endless output", "signals to all", "binary output"}
"""Programs that reach, by other means, the limits and ends of those that always run: one of each verdict, and a fork bomb."""
SLOW_CHEATS = set(CHEATS) - {
    # Ends before the calls, and in them.
    *("exits at its start", "exits when it is called", "exits at the end"),
    # Objects and functions that lie.
    *("returns what equals everything", "changes builtins", "replaces the encoder"),
    # Writes to the channel of the results, and reads of the tests.
    *("writes a verdict", "writes results of other calls", "reads the tests"),
    # Results that the host must not read whole.
    *("returns too much", "returns itself"),
}
"""Cheats that are further forms of those that always run."""


def cases(names: Iterable[str], slow: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else [], id=name) for name in names]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a server, a process, a file and an abstract socket of the host as standard input. They must survive."""
    secret = tmp_path / "secret.txt"
    secret.write_text("do not read")
    monkeypatch.setenv("API_SECRET", "do not read")  # pragma: allowlist secret - no secret
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server, hidden = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    name = f"{MARKER}-{os.getpid()}"
    with closing(server), closing(hidden):
        hidden.bind(f"\0{name}")
        hidden.listen()
        server.setblocking(False)
        mounts_before, files_before = mounts(), files()
        yield f"{server.getsockname()[1]}\n{victim.pid}\n{secret}\n{name}\n"
        survived = victim.poll() is None
        victim.kill()
        victim.wait()
        assert survived
        assert leftovers() == []
        assert mounts() <= mounts_before
        assert files() <= files_before
        with pytest.raises(BlockingIOError):
            server.accept()
    assert secret.read_text() == "do not read"


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_contained(attack: str, box: Sandbox, host: str) -> None:
    report = run_with_input(box, Program(ATTACKS[attack]), [InputOutput(host, "contained")], PATIENT)
    assert report.kinds == (Kind.PASSED,)


@pytest.mark.parametrize("name", cases(LIMITED, SLOW_LIMITED))
def test_a_limit_ends_the_program(name: str, box: Sandbox, host: str) -> None:
    source, kinds = LIMITED[name]
    limits = LIMITS if "time limit" in kinds else PATIENT
    report = run_with_input(box, Program(source), [InputOutput("", "never")], limits)
    assert report.kinds[0] in kinds


@pytest.mark.parametrize("cheat", cases(CHEATS, SLOW_CHEATS))
def test_a_cheat_passes_no_test(cheat: str, box: Sandbox, host: str) -> None:
    tests = ["assert add(2, 3) == 5", "assert add(2, 5) == 7"]
    report = run_with_calls(box, Program(CHEATS[cheat]), tests, LIMITS)
    assert report.passed == 0
