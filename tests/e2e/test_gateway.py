"""A run's gateway as users meet it: its link, commands through it, its end and its return; and runs on the disk."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Run, Service, Start

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
WITHIN = 10.0
"""Seconds from Ctrl-C to the end of the command."""


def link(command: Command) -> tuple[str, str]:
    """Address and token of the link, once it is printed."""
    result = command.wait_for(lambda: re.search(r"^dashboard: (http://127\.0\.0\.1:\d+)/#(\S+)", command.out, re.M))
    return result[1], result[2].rpartition("token=")[2]


def ask(address: str, token: str | None, path: str = "") -> httpx2.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.get(f"{address}/api/v1{path}", headers=headers, timeout=20)


def said(start: Start, *arguments: str) -> str:
    """Return what a command prints that succeeds."""
    ended = start(*arguments).ended()
    assert (ended.code, ended.err) == (0, ""), ended
    return ended.out


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_watched_and_commanded_through_its_gateway_which_comes_back_where_it_was(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS)
    address, token = link(command)
    assert ask(address, None, "/session").status_code == 401
    assert ask(address, token, "/session").json()["access"] == "operator"
    assert stat.S_IMODE((run / "gateway.json").stat().st_mode) == 0o600
    environment = Path(f"/proc/{command.child('actor')}/environ").read_bytes()
    assert token.encode() not in environment, "a service was told the gateway's token"
    watching = start("watch", "runs/tiny")
    watching.wait_for(lambda: "step " in watching.out)

    told = said(start, "set", "runs/tiny", "kl_coefficient=0.2")
    changed = re.fullmatch(r"runs/tiny: kl_coefficient 0\.05 -> 0\.2 from step (\d+) on\n", told)
    assert changed, told
    command.wait_for(lambda: committed_steps(run) >= int(changed[1]))
    assert [step["kl_coefficient"] for step in metrics(run)[: int(changed[1])]][-2:] == [0.05, 0.2]
    assert "kl_coefficient = 0.2 (from " in said(start, "set", "runs/tiny")
    refused = start("set", "runs/tiny", "kl_coefficient=1e9", "actor.learning_rate=1e-4").ended()
    assert (refused.code, refused.out) == (2, "")
    assert re.match(r"error: runs/tiny: kl_coefficient", refused.err), refused

    said(start, "checkpoint", "runs/tiny")
    watching.wait_for(lambda: "checkpoint of step " in watching.out)
    said(start, "pause", "runs/tiny")
    command.wait_for(lambda: "quartet resume runs/tiny continues" in command.out)
    paused_at = committed_steps(run)

    before = command.child("gateway")
    os.kill(before, signal.SIGKILL)
    command.wait_for(
        lambda: re.search(r"gateway: killed by SIGKILL; restarted[^\n]*\ngateway: back after", command.out)
    )
    assert command.child("gateway") != before
    shown = ask(address, token, "/runs/tiny").json()
    assert (shown["state"], shown["step"]) == ("paused", paused_at)
    assert committed_steps(run) == paused_at
    said(start, "resume", "runs/tiny")
    command.wait_for(lambda: committed_steps(run) > paused_at + 1)
    said(start, "stop", "runs/tiny")

    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert not (run / "gateway.json").exists()
    assert (run / "policy" / "model.safetensors").is_file()
    watched = watching.ended()
    assert (watched.code, watched.err) == (0, ""), watched
    steps = [int(step) for step in re.findall(r"^step (\d+)/", watched.out, re.M)]
    assert steps == list(range(steps[0], len(metrics(run)) + 1)), "a step is missing from what is shown, or shown twice"
    assert "kl_coefficient 0.05 -> 0.2 from step" in watched.out
    asked = [json.loads(line)["command"] for line in (run / "audit.jsonl").read_text().splitlines()]
    assert asked == ["set", "set", "checkpoint", "pause", "resume", "stop"]
    late = start("pause", "runs/tiny").ended()
    assert late.err == "error: run runs/tiny: not active; give the directory of an active run, such as runs/NAME\n"
    assert said(start, "report", "runs/tiny") == "report: runs/tiny/report.html\n"


def test_a_run_goes_on_without_a_gateway_that_is_given_up_and_ctrl_c_ends_it(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    none = settings("recovery.max_restarts=0")
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS, *none)
    link(command)
    os.kill(command.child("gateway"), signal.SIGKILL)
    without = "gateway: killed by SIGKILL; the run continues without it, see runs/tiny/logs/gateway.log"
    command.wait_for(lambda: without in command.out.splitlines())
    at = committed_steps(run)
    command.wait_for(lambda: committed_steps(run) > at + 1)
    (run / "gateway.json").unlink()
    refused = start("stop", "runs/tiny").ended()
    assert refused.code == 2
    assert refused.err.startswith("error: run runs/tiny: is active but has no gateway")
    command.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - asked < WITHIN
    assert (ended.code, ended.err, ended.left) == (130, "stopped\n", [])


def test_an_address_that_is_taken_is_told_before_the_run_begins_and_no_folder_is_left(
    start: Start, config: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = start("train", config, *settings(f"gateway.listen={listen}")).ended()
    assert (ended.code, ended.left) == (2, [])
    assert ended.err.startswith(
        f"error: gateway.listen {listen}: cannot listen there (Address already in use); stop the process"
    )
    assert not (tmp_path / "runs").exists()


def test_runs_on_the_disk_are_viewed_with_nothing_else_running(first_run: Run, start: Start, tmp_path: Path) -> None:
    command = start("view", first_run.directory)
    address, token = link(command)
    assert f"{address}/#/runs/tiny/overview&token={token}" in command.out
    listed = ask(address, token, "/runs").json()["items"]
    assert [(run["name"], run["state"], run["live"]) for run in listed] == [("tiny", "finished", False)]
    assert not (first_run.directory / "gateway.json").exists(), "a viewer is not the run's own gateway"
    (tmp_path / "token").write_text(f"{token}\n")
    url = f"{address}/runs/tiny"
    watched = start("watch", url, "--token-file", "token").ended()
    assert (watched.code, watched.out) == (0, "tiny: finished\n"), watched
    refused = start("pause", url, "--token-file", "token").ended()
    assert (refused.code, refused.out) == (2, "")
    assert "not active, so it accepts no commands" in refused.err
    (tmp_path / "token").write_text("x" * 32)
    unknown = start("watch", url, "--token-file", "token").ended()
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith(f"error: {url}: the gateway refuses this token")
    command.process.send_signal(signal.SIGINT)
    ended = command.ended(WITHIN)
    assert (ended.code, ended.err, ended.left) == (130, "stopped\n", [])
