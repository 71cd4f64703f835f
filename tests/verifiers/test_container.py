"""Programs in containers of Docker or Podman. Skipped without an engine that has the image QUARTET_SANDBOX_IMAGE."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.programs import InputOutput, Kind, Program, run_with_calls, run_with_input
from quartet.verifiers.sandbox import container
from quartet.verifiers.sandbox.container import Container
from quartet.verifiers.sandbox.process import Limits, Sandbox
from quartet.verifiers.sandbox.selection import DEFAULT_IMAGE, open_sandbox
from tests.verifiers.hostile_programs import ATTACKS

LIMITS = Limits(seconds=60.0, cpu_seconds=60)
UNSUITED = {
    "hides memory in memfd",
    "hides memory in message queues",
    "hides memory in shared segments",
    "opens sockets of other families",
    "reads /proc of other processes",
    "reads the host's files",
    "uses inherited descriptors",
}
"""Attacks that print "escaped" in a container although they reach nothing of the host: it has files of its image, /proc, sockets
without a network, and a cgroup that counts its memory."""


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> Sandbox:
    try:
        return open_sandbox(request.param, image=os.environ.get("QUARTET_SANDBOX_IMAGE", DEFAULT_IMAGE))
    except SandboxFailed as error:
        pytest.skip(str(error))


def containers(engine: Sandbox) -> str:
    """Return the names of the engine's containers that run programs."""
    command = [shutil.which(engine.name.split()[0]) or "", "ps", "--all", "--quiet", "--filter", "name=quartet-sandbox"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_programs_pass_and_fail_in_a_container(engine: Sandbox) -> None:
    tests = [InputOutput("2", "2"), InputOutput("2", "3")]
    assert run_with_input(engine, Program("print(input())"), tests, LIMITS).kinds == (Kind.PASSED, Kind.WRONG_ANSWER)
    report = run_with_calls(engine, Program("def f(x): return x"), ["assert f(1) == 1", "assert f(1) == 2"], LIMITS)
    assert report.kinds == (Kind.PASSED, Kind.WRONG_ANSWER)
    assert containers(engine) == ""


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import time\ntime.sleep(1000)", Kind.TIME_LIMIT),
        ("bytearray(10**12)", Kind.MEMORY_LIMIT),
        ("while True: print('x' * 1000)", Kind.OUTPUT_LIMIT),
        ("raise SystemExit(125)", Kind.RUNTIME_ERROR),
    ],
)
def test_a_limit_ends_the_container(source: str, kind: Kind, engine: Sandbox) -> None:
    limits = Limits(seconds=3.0) if kind is Kind.TIME_LIMIT else LIMITS
    assert run_with_input(engine, Program(source), [InputOutput("", "")], limits).kinds == (kind,)
    assert containers(engine) == ""


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(set(ATTACKS) - UNSUITED))
def test_an_attack_is_contained_in_a_container(attack: str, engine: Sandbox) -> None:
    host = f"9\n{os.getpid()}\n{Path(__file__)}\nquartet-test\n"
    report = run_with_input(engine, Program(ATTACKS[attack]), [InputOutput(host, "contained")], LIMITS)
    assert report.kinds == (Kind.PASSED,)


def test_output_that_is_not_read_does_not_hold_up_the_end_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An engine whose command kill waits for the client, as Docker's does while output of the container is pending.
    process, tool = tmp_path / "process", tmp_path / "docker"
    tool.write_text(
        f"""#!/bin/sh
case "$1" in
run) for last; do :; done; echo $$ > {process}; exec python3 -I -S -B -c "$last" ;;
kill) while kill -0 "$(cat {process})" && ! grep -q "State:.Z" "/proc/$(cat {process})/status"; do sleep 0.05; done ;;
esac
"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(container, "END_SECONDS", 10.0)
    limits = Limits(seconds=60.0, cpu_seconds=60, output_bytes=1000)
    report = run_with_input(
        Container("docker", "image"), Program("while True: print('x' * 1000)"), [InputOutput("", "")], limits
    )
    assert report.kinds == (Kind.OUTPUT_LIMIT,)


def test_a_container_gets_no_network_no_capabilities_and_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "arguments"
    tool = tmp_path / "docker"
    tool.write_text(f'#!/bin/sh\n[ "$1" = run ] && printf "%s\\n" "$@" > {recorded}\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxFailed, match="did not start"):
        run_with_input(
            Container("docker", "image"), Program(""), [InputOutput("", "")], Limits(memory_mb=100, processes=3)
        )
    arguments = recorded.read_text().split("\n")
    for option, value in (
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--user", "65534:65534"),
        ("--memory", "100m"),
        ("--memory-swap", "100m"),
        ("--pids-limit", "3"),
        ("--pull", "never"),
    ):
        assert arguments[arguments.index(option) + 1] == value
    assert "--read-only" in arguments
    assert "--rm" in arguments
