"""The gateway as a process: invalid input, readiness and shutdown."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from quartet import __version__
from quartet.gateway.__main__ import OPERATOR_TOKEN_VARIABLE, PUBLISHED_ADDRESS_VARIABLE, VIEWER_TOKEN_VARIABLE, main
from quartet.telemetry.logs import configure_logs
from tests.gateway.serving import create_run
from tests.waiting import LIMIT

TOKEN = "a-token-for-these-tests"
TIMEOUT = LIMIT


class Process:
    """A gateway process that reports readiness through a pipe."""

    def __init__(self, *arguments: str, pipe: bool = True, output: BinaryIO | None = None, **environment: str) -> None:
        """``output`` receives output and logs; an unread pipe would block the process."""
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "quartet.gateway", *arguments, *(["--ready-fd", str(writer)] if pipe else [])]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in (OPERATOR_TOKEN_VARIABLE, VIEWER_TOKEN_VARIABLE)
        }
        self.process = subprocess.Popen(
            command,
            stdout=output or subprocess.PIPE,
            stderr=output or subprocess.PIPE,
            text=True,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
            pass_fds=(writer,) if pipe else (),
        )
        os.close(writer)
        self._pipe = os.fdopen(reader)

    def message(self) -> dict[str, Any]:
        """Return the next message from the pipe."""
        message: dict[str, Any] = json.loads(self._pipe.readline())
        return message

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float, str]:
        """Send a signal; return exit status, seconds until the exit, and standard error."""
        start = time.monotonic()
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, time.monotonic() - start, error

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._pipe.close()


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """Restore the log configuration of the tests, which ``main`` changes."""
    yield
    configure_logs("tests")


@pytest.fixture
def start_process() -> Iterator[Any]:
    processes: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        processes.append(Process(*arguments, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def get(address: str, path: str, token: str = TOKEN) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={"authorization": f"Bearer {token}"})
    return connection.getresponse()


@pytest.mark.slow
def test_a_killed_gateway_restarts_at_the_same_address_and_exits_at_once_with_open_streams(
    tmp_path: Path, start_process: Any
) -> None:
    files = create_run(tmp_path, steps=1)
    arguments = ("--config", str(files.config))
    first = start_process(*arguments, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    address = first.message()["address"]
    assert json.loads(files.gateway.read_text()) == {"url": f"http://{address}", "token": TOKEN}
    assert files.gateway.stat().st_mode & 0o777 == 0o600
    # An open connection at the time of the kill leaves the port in TIME_WAIT.
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    first.process.kill()
    first.process.wait()
    assert files.gateway.exists()
    second = start_process(*arguments, "--listen", address, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    assert second.message() == {"address": address}
    session = get(address, "/api/v1/session")
    assert json.loads(session.read()) == {
        "access": "operator",
        "version": __version__,
        "run": "some",
        "may_start_runs": True,
    }
    assert session.headers["server"] is None
    assert get(address, "/api/v1/runs/some").status == 200
    stream = get(address, "/api/v1/runs/some/events")
    assert stream.readline()
    status, seconds, error = second.end()
    assert status == 0, error
    assert seconds < 2.0
    assert TOKEN not in error
    assert "Traceback" not in error
    assert not files.gateway.exists()


def test_the_link_with_a_generated_token_is_printed(tmp_path: Path, start_process: Any) -> None:
    process = start_process("--runs", str(tmp_path), pipe=False)
    link = process.process.stdout.readline()
    match = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/#token=([\w-]{40,})\n", link)
    assert match is not None, link
    session = json.loads(get(match[1], "/api/v1/session", match[2]).read())
    assert (session["run"], session["may_start_runs"]) == (None, True)
    status, seconds, _ = process.end(signal.SIGINT)
    assert status == 0
    assert seconds < 2.0


def test_the_link_has_the_published_port_of_a_container_and_no_configured_token(
    tmp_path: Path, start_process: Any
) -> None:
    environment = {OPERATOR_TOKEN_VARIABLE: TOKEN, PUBLISHED_ADDRESS_VARIABLE: "127.0.0.1:18080"}
    process = start_process("--runs", str(tmp_path), pipe=False, **environment)
    assert process.process.stdout.readline() == "http://127.0.0.1:18080\n"
    status, _, error = process.end()
    assert status == 0
    assert TOKEN not in error


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ([], {OPERATOR_TOKEN_VARIABLE: ""}, f"{OPERATOR_TOKEN_VARIABLE}: has 0 characters; expected at least 16"),
        ([], {OPERATOR_TOKEN_VARIABLE: "short"}, "has 5 characters"),
        ([], {OPERATOR_TOKEN_VARIABLE: "with spaces in it it is none"}, "without spaces"),
        ([], {VIEWER_TOKEN_VARIABLE: ""}, f"{VIEWER_TOKEN_VARIABLE}: has 0 characters"),
        ([], {OPERATOR_TOKEN_VARIABLE: TOKEN, VIEWER_TOKEN_VARIABLE: TOKEN}, "is the same as"),
        (["--listen", "0.0.0.0:0"], {}, "not a loopback address"),
        (["--listen", "127.0.0.1"], {}, "expected HOST:PORT"),
        (["--listen", "127.0.0.1:TAKEN"], {}, "the port is in use"),
    ],
)
def test_invalid_input_ends_with_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    text: str,
) -> None:
    files = create_run(tmp_path)
    for name in (OPERATOR_TOKEN_VARIABLE, VIEWER_TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, token in environment.items():
        monkeypatch.setenv(name, token)
    reader, writer = os.pipe()
    with socket.socket() as other, os.fdopen(reader) as pipe:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        actual_arguments = [argument.replace("TAKEN", port) for argument in arguments]
        assert main(["--runs", str(tmp_path), *actual_arguments, "--ready-fd", str(writer)]) == 2
        message = json.loads(pipe.readline())
    assert text in message["error"]
    assert message["exit_code"] == 2
    error = capsys.readouterr().err
    assert f"error: {message['error']}" in error
    assert "Traceback" not in error
    assert not files.gateway.exists()
