"""Exit statuses of docs/reference/exit-status.md that no other test checks, of commands, services and the gateway."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.gateway import __main__ as gateway
from quartet.rpc import health
from quartet.rpc.security.certificates import Authority
from quartet.services import __main__ as services
from quartet.telemetry.logs import configure_logs
from tests.e2e.commands import Command, settings
from tests.e2e.conftest import Run, Start

Status = Callable[..., tuple[int, str]]


def run_module(*arguments: str | Path, cwd: Path) -> tuple[int, str]:
    """Run ``python -m ARGUMENTS``; return its exit status and the last line of standard error."""
    command = Command(sys.executable, "-m", *arguments, cwd=cwd)
    try:
        result = command.wait()
    finally:
        command.clean_up()
    return result.code, result.err.splitlines()[-1]


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Status]:
    """Call the main function of a module that refuses its arguments, as ``run_module`` runs it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # Restored after the test.

    def call(main: Callable[[list[str]], int], *arguments: str | Path) -> tuple[int, str]:
        try:
            code: Any = main(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err.splitlines()[-1]

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
    configure_logs("tests")


# tests/e2e/test_gateway.py ends the command by SIGINT.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ended_by_a_signal_exits_with_130(start: Start, first_run: Run, number: signal.Signals) -> None:
    command = start("view", first_run.directory)
    command.wait_for(lambda: "dashboard:" in command.out)
    os.kill(command.process.pid, number)
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (130, "stopped\n", [])


def test_a_service_without_its_redis_exits_with_1(config: Path, tmp_path: Path) -> None:
    unreachable = settings("buffer.url=redis://127.0.0.1:1/0", "timeouts.load_seconds=0.1")
    code, stderr = run_module("quartet.services", "critic", "--config", config, *unreachable, cwd=tmp_path)
    assert code == 1
    assert stderr.startswith("error: rollout buffer at redis://127.0.0.1:1/0: unreachable")


@pytest.mark.parametrize("module", [services, gateway])
def test_an_unknown_option_exits_with_2(module: Any, status: Status) -> None:
    code, stderr = status(module.main, "--confg", "x")
    assert code == 2
    assert "error: " in stderr


def test_an_address_in_use_exits_with_2(config: Path, status: Status, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        address_in_use = f"127.0.0.1:{other.stdout.readline().strip()}"
        metrics = settings(f"services.reference.metrics_listen={address_in_use}")
        code, stderr = run_module("quartet.services", "reference", "--config", config, *metrics, cwd=tmp_path)
        assert (code, stderr[:60]) == (
            2,
            f"error: services.reference.metrics_listen {address_in_use}: cannot listen there"[:60],
        )
        code, stderr = status(gateway.main, "--runs", tmp_path, "--listen", address_in_use)
        assert (code, stderr.startswith(f"error: listen {address_in_use}: the port is in use")) == (2, True)
        other.kill()


LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_gateway_that_fails_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway, "_run", lambda *_: 1 / 0)
    assert gateway.main(["--runs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("error: division by zero\n")
    configure_logs("tests")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:70000", "127.0.0.1:x"])
def test_an_invalid_listen_address_exits_with_2(listen: str, config: Path, status: Status) -> None:
    code, stderr = status(services.main, "reward", "--config", config, "--listen", listen)
    assert code == 2
    assert stderr.startswith("error: ")
    assert "services.reward.listen" in stderr
    assert "expected HOST:PORT" in stderr


def test_a_certificate_of_another_process_exits_with_2(config: Path, status: Status, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    Authority(timedelta(days=1)).issue(folder / "reward", ["critic.quartet"])
    secured = settings(f"security.certificates={folder}")
    code, stderr = status(services.main, "reward", "--config", config, *secured)
    assert code == 2
    assert "names critic.quartet; expected reward.quartet" in stderr


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_health_check_without_a_valid_address_exits_with_2(
    arguments: list[str], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(given: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["health", *given])
        runpy.run_path(str(health.__file__), run_name="__main__")
        return 0

    assert status(main, *arguments) == (2, "error: expected one argument: the HOST:PORT of a health listener")
