"""Exit statuses of docs/reference/exit-status.md that no other test sees: the commands, the services and the gateway, as
processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from quartet.gateway import __main__ as gateway
from quartet.rpc.security.certificate_authority import Authority
from tests.e2e.commands import settings
from tests.e2e.conftest import Run, Start


def status(*arguments: str | Path, cwd: Path) -> tuple[int, str]:
    """Of ``python -m ARGUMENTS``, and its last line on standard error."""
    command = [sys.executable, "-m", *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_a_signal_ended(start: Start, first_run: Run, number: signal.Signals) -> None:
    command = start("view", first_run.directory)
    command.wait_for(lambda: "dashboard:" in command.out)
    command.process.send_signal(number)
    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (130, "stopped\n", [])


def test_a_service_that_cannot_reach_what_it_needs(config: Path, tmp_path: Path) -> None:
    nowhere = settings("buffer.url=redis://127.0.0.1:1/0")
    code, said = status("quartet.services", "critic", "--config", config, *nowhere, cwd=tmp_path)
    assert code == 1
    assert said.startswith("error: rollout buffer at redis://127.0.0.1:1/0: unreachable")


@pytest.mark.parametrize("module", ["quartet.services", "quartet.gateway"])
def test_a_process_whose_options_are_wrong(module: str, tmp_path: Path) -> None:
    code, said = status(module, "--confg", "x", cwd=tmp_path)
    assert code == 2
    assert "error: " in said


def test_a_process_whose_address_is_taken(config: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        taken = f"127.0.0.1:{other.stdout.readline().strip()}"
        metrics = settings(f"services.reference.metrics_listen={taken}")
        code, said = status("quartet.services", "reference", "--config", config, *metrics, cwd=tmp_path)
        assert (code, said[:60]) == (2, f"error: services.reference.metrics_listen {taken}: cannot listen there"[:60])
        code, said = status("quartet.gateway", "--runs", tmp_path, "--listen", taken, cwd=tmp_path)
        assert (code, said.startswith(f"error: listen {taken}: the port is in use")) == (2, True)
        other.kill()


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_gateway_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway, "_run", lambda *_: 1 / 0)
    assert gateway.main(["--runs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("error: division by zero\n")
    structlog.reset_defaults()


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:70000", "127.0.0.1:x"])
def test_a_service_that_is_to_listen_at_what_is_no_address(listen: str, config: Path, tmp_path: Path) -> None:
    code, said = status("quartet.services", "reward", "--config", config, "--listen", listen, cwd=tmp_path)
    assert code == 2
    assert said.startswith("error: ")
    assert "services.reward.listen" in said
    assert "expected HOST:PORT" in said


def test_a_service_that_has_the_certificate_of_another(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    Authority(timedelta(days=1)).issue(folder / "reward", ["critic.quartet"])
    secured = settings(f"security.certificates={folder}")
    code, said = status("quartet.services", "reward", "--config", config, *secured, cwd=tmp_path)
    assert code == 2
    assert "names critic.quartet; expected reward.quartet" in said


@pytest.mark.parametrize("given", [[], ["nonsense"]])
def test_a_health_check_of_no_address(given: list[str], tmp_path: Path) -> None:
    code, said = status("quartet.rpc.health", *given, cwd=tmp_path)
    assert (code, said) == (2, "error: expected one argument: the HOST:PORT of a health listener")
