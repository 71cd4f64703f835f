"""The gateway of a run: its dashboard link, commands, restarts and failure; and ``quartet view`` of finished runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Call, Run, Service, Start
from tests.waiting import LIMIT

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
SHUTDOWN_TIMEOUT = 10.0
"""Seconds from Ctrl-C to the end of the command."""


def dashboard_link(command: Command) -> tuple[str, str]:
    """Wait for the dashboard link; return its address and token."""
    result = command.wait_for(lambda: re.search(r"^dashboard: (http://127\.0\.0\.1:\d+)/#(\S+)", command.out, re.M))
    return result[1], result[2].rpartition("token=")[2]


def get(address: str, token: str | None, path: str = "") -> httpx2.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.get(f"{address}/api/v1{path}", headers=headers, timeout=LIMIT)


def run_command(call: Call, *arguments: str) -> str:
    """Run a command that must succeed; return its standard output."""
    result = call(*arguments)
    assert (result.code, result.err) == (0, ""), result
    return result.out


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_watch_and_commands_work_through_a_gateway_that_restarts_at_the_same_address(
    start: Start, call: Call, config: Path, frozen: Service, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS)
    address, token = dashboard_link(command)
    assert get(address, None, "/session").status_code == 401
    assert get(address, token, "/session").json()["access"] == "operator"
    assert stat.S_IMODE((run / "gateway.json").stat().st_mode) == 0o600
    watching = start("watch", "runs/tiny")
    watching.wait_for(lambda: "step " in watching.out)

    output = run_command(call, "set", "runs/tiny", "kl_coefficient=0.2")
    changed = re.fullmatch(r"runs/tiny: kl_coefficient 0\.05 -> 0\.2 from step (\d+) on\n", output)
    assert changed, output
    command.wait_for(lambda: committed_steps(run) >= int(changed[1]))
    assert [step["kl_coefficient"] for step in metrics(run)[: int(changed[1])]][-2:] == [0.05, 0.2]
    assert "kl_coefficient = 0.2 (from " in run_command(call, "set", "runs/tiny")
    refused = call("set", "runs/tiny", "kl_coefficient=1e9", "actor.learning_rate=1e-4")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: runs/tiny: kl_coefficient 1e+09: expected 0 to "), refused
    unknown = call("set", "runs/tiny", "kl_coeff=0.1")
    assert unknown.code == 2
    assert unknown.err.startswith(
        "error: kl_coeff: not a setting that an active run can change, did you mean kl_coefficient? such settings: "
    ), unknown

    run_command(call, "checkpoint", "runs/tiny")
    watching.wait_for(lambda: "checkpoint of step " in watching.out)
    run_command(call, "pause", "runs/tiny")
    command.wait_for(lambda: "quartet resume runs/tiny continues" in command.out)
    paused_at = committed_steps(run)

    before = command.child("gateway")
    os.kill(before, signal.SIGKILL)
    command.wait_for(
        lambda: re.search(r"gateway: killed by SIGKILL; restarted[^\n]*\ngateway: back after", command.out)
    )
    assert command.child("gateway") != before
    shown = get(address, token, "/runs/tiny").json()
    assert (shown["state"], shown["step"]) == ("paused", paused_at)
    assert committed_steps(run) == paused_at
    run_command(call, "resume", "runs/tiny")
    # After the death of the gateway, watch connects again, with pauses. It must have done so before the run ends.
    watching.wait_for(lambda: f"step {paused_at + 2}/" in watching.out)
    run_command(call, "stop", "runs/tiny")

    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert not (run / "gateway.json").exists()
    assert (run / "policy" / "model.safetensors").is_file()
    watched = watching.wait()
    assert (watched.code, watched.err) == (0, ""), watched
    steps = [int(step) for step in re.findall(r"^step (\d+)/", watched.out, re.M)]
    assert steps == list(range(steps[0], len(metrics(run)) + 1)), "a step is missing from what is shown, or shown twice"
    assert "kl_coefficient 0.05 -> 0.2 from step" in watched.out
    commands = [json.loads(line)["command"] for line in (run / "audit.jsonl").read_text().splitlines()]
    assert commands == ["set", "set", "checkpoint", "pause", "resume", "stop"]
    late = call("pause", "runs/tiny")
    assert late.err.startswith("error: run runs/tiny: is not active: ")
    assert run_command(call, "report", "runs/tiny") == "report: runs/tiny/report.html\n"


def test_an_address_in_use_is_reported_before_the_run_starts_and_leaves_no_folder(
    call: Call, config: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        result = call("train", config, *settings(f"gateway.listen={listen}"))
    assert (result.code, result.leftovers) == (2, [])
    assert result.err.startswith(
        f"error: gateway.listen {listen}: cannot listen there (Address already in use); stop the process"
    )
    assert not (tmp_path / "runs").exists()


def test_view_shows_a_finished_run_without_any_other_process(
    first_run: Run, start: Start, call: Call, tmp_path: Path
) -> None:
    command = start("view", first_run.directory)
    address, token = dashboard_link(command)
    assert f"{address}/#/runs/tiny/overview&token={token}" in command.out
    listed = get(address, token, "/runs").json()["items"]
    assert [(run["name"], run["state"], run["live"]) for run in listed] == [("tiny", "finished", False)]
    assert not (first_run.directory / "gateway.json").exists(), "a viewer is not the run's own gateway"
    (tmp_path / "token").write_text(f"{token}\n")
    url = f"{address}/runs/tiny"
    watched = call("watch", url, "--token-file", "token")
    assert (watched.code, watched.out) == (0, "tiny: finished\n"), watched
    refused = call("pause", url, "--token-file", "token")
    assert (refused.code, refused.out) == (2, "")
    assert "not active, so it accepts no commands" in refused.err
    (tmp_path / "token").write_text("x" * 32)
    unknown = call("watch", url, "--token-file", "token")
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith(f"error: {url}: the gateway refuses this token")
    os.kill(command.process.pid, signal.SIGINT)
    result = command.wait(SHUTDOWN_TIMEOUT)
    assert (result.code, result.err, result.leftovers) == (130, "stopped\n", [])
