"""The gateway as a process: whom it refuses to start for, what it says when it is ready, how it ends."""

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
import structlog

from quartet import __version__
from quartet.gateway.__main__ import OPERATOR_TOKEN_VARIABLE, PUBLISHED_ADDRESS_VARIABLE, VIEWER_TOKEN_VARIABLE, main
from tests.gateway.serving import a_run

TOKEN = "a-token-for-these-tests"
PATIENCE = 30.0


class Process:
    """A gateway's process, told to say through a pipe when it is ready."""

    def __init__(self, *arguments: str, pipe: bool = True, output: BinaryIO | None = None, **environment: str) -> None:
        """``output`` takes what it prints and logs: what nobody reads from a pipe would stop it."""
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

    def says(self) -> dict[str, Any]:
        """The next line of the pipe."""
        found: dict[str, Any] = json.loads(self._pipe.readline())
        return found

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float, str]:
        """Exit status, seconds from the signal to the end, standard error."""
        begun = time.monotonic()
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, time.monotonic() - begun, error

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._pipe.close()


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """What a process does to its logs is not to last here."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def started() -> Iterator[Any]:
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


def test_it_tells_the_run_where_it_is_and_ends_at_once_though_streams_are_open(tmp_path: Path, started: Any) -> None:
    files = a_run(tmp_path, steps=1)
    process = started("--config", str(files.config), **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    address = process.says()["address"]
    assert json.loads(files.gateway.read_text()) == {"url": f"http://{address}", "token": TOKEN}
    assert files.gateway.stat().st_mode & 0o777 == 0o600
    session = get(address, "/api/v1/session")
    assert json.loads(session.read()) == {
        "access": "operator",
        "version": __version__,
        "run": "some",
        "may_start_runs": True,
    }
    assert session.headers["server"] is None
    stream = get(address, "/api/v1/runs/some/events")
    assert stream.readline()
    status, seconds, error = process.end()
    assert status == 0, error
    assert seconds < 2.0
    assert TOKEN not in error
    assert "Traceback" not in error
    assert not files.gateway.exists()


def test_the_link_is_printed_where_nobody_else_asks_for_it(tmp_path: Path, started: Any) -> None:
    process = started("--runs", str(tmp_path), pipe=False)
    link = process.process.stdout.readline()
    found = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/#token=([\w-]{40,})\n", link)
    assert found is not None, link
    session = json.loads(get(found[1], "/api/v1/session", found[2]).read())
    assert (session["run"], session["may_start_runs"]) == (None, True)
    status, seconds, _ = process.end(signal.SIGINT)
    assert status == 0
    assert seconds < 2.0


def test_a_token_that_was_given_is_not_printed(tmp_path: Path, started: Any) -> None:
    process = started("--runs", str(tmp_path), pipe=False, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", process.process.stdout.readline())
    status, _, error = process.end()
    assert status == 0
    assert TOKEN not in error


def test_in_a_container_the_link_has_the_port_that_is_published(tmp_path: Path, started: Any) -> None:
    given = {OPERATOR_TOKEN_VARIABLE: TOKEN, PUBLISHED_ADDRESS_VARIABLE: "127.0.0.1:18080"}
    process = started("--runs", str(tmp_path), pipe=False, **given)
    assert process.process.stdout.readline() == "http://127.0.0.1:18080\n"


def test_it_comes_back_at_the_same_address_after_it_was_killed(tmp_path: Path, started: Any) -> None:
    files = a_run(tmp_path, steps=1)
    arguments = ("--config", str(files.config))
    first = started(*arguments, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    address = first.says()["address"]
    # A connection that is open when it dies keeps the port busy for a while.
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    first.process.kill()
    first.process.wait()
    assert files.gateway.exists()
    second = started(*arguments, "--listen", address, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
    assert second.says() == {"address": address}
    assert get(address, "/api/v1/runs/some").status == 200


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
def test_what_it_refuses_to_start_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    text: str,
) -> None:
    files = a_run(tmp_path)
    for name in (OPERATOR_TOKEN_VARIABLE, VIEWER_TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, token in environment.items():
        monkeypatch.setenv(name, token)
    reader, writer = os.pipe()
    with socket.socket() as taken, os.fdopen(reader) as pipe:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = [argument.replace("TAKEN", port) for argument in arguments]
        assert main(["--runs", str(tmp_path), *given, "--ready-fd", str(writer)]) == 2
        said = json.loads(pipe.readline())
    assert text in said["error"]
    assert said["exit_code"] == 2
    error = capsys.readouterr().err
    assert f"error: {said['error']}" in error
    assert "Traceback" not in error
    assert not files.gateway.exists()
