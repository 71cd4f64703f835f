"""`quartet profile` of real processes: its summary and traces, the bits of the run, and a service that is killed."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import committed_steps, settings
from tests.e2e.conftest import Call, Run, Service, Start, step_metrics, weights
from tests.e2e.test_gateway import ENDLESS, dashboard_link, get

STEPS = 5
SHORT = settings(f"run.steps={STEPS}", "checkpoint.every_steps=0")


def test_a_profile_is_printed_and_saved_and_changes_no_bit(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    plain = start("train", config, *frozen.serving("reward", "reference"), *SHORT, "--set", "run.name=plain")
    assert plain.wait().code == 0
    # The run is in its second step when the command arrives, and in its last one until the command has ended.
    failpoints = f"orchestrator.sealed=hold@2,orchestrator.committed=hold@{STEPS}"
    held = {VARIABLE: failpoints, FOLDER_VARIABLE: str(tmp_path)}
    command = start("train", config, *frozen.serving("reward", "reference"), *SHORT, environment=held)
    run = tmp_path / "runs" / "tiny"
    command.wait_for((tmp_path / "orchestrator.sealed.reached").exists)
    profile = start("profile", "runs/tiny", "--steps", "2")
    profile.wait_for(lambda: "profiles the next 2 steps" in profile.out)
    (tmp_path / "orchestrator.sealed.go").touch()
    profiled = profile.wait()
    (tmp_path / "orchestrator.committed.go").touch()
    assert profiled.code == 0, profiled
    assert command.wait().code == 0
    assert committed_steps(run) == STEPS
    [folder] = (run / "profiles").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    first = summary["step"]
    assert summary["last_step"] == first + 1
    assert f"profile of steps {first} to {first + 1}: step {first} " in profiled.out
    assert "actor (cpu): " in profiled.out
    assert "critic (cpu): " in profiled.out
    assert "operators by self time" in profiled.out
    actor, critic = summary["services"]
    assert actor["summary"]["work_seconds"].keys() == {"generate", "update"}
    assert critic["summary"]["work_seconds"].keys() == {"values", "update"}
    for service in (actor, critic):
        assert service["problem"] == ""
        events = json.loads(gzip.decompress((folder / service["file"]).read_bytes()))["traceEvents"]
        assert [event["name"] for event in events].count("quartet: update") == 2
        assert sum(summary["step_seconds"].values()) < service["summary"]["seconds"] + 1.0

    def of(directory: Path) -> Run:
        return Run(profiled, directory)

    assert step_metrics(of(run)) == step_metrics(of(tmp_path / "runs" / "plain"))
    assert weights(run) == weights(tmp_path / "runs" / "plain")


def test_the_profile_of_a_service_that_is_killed_is_incomplete_and_training_goes_on(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS)
    command.wait_for(lambda: committed_steps(run) >= 1)
    profiling = start("profile", "runs/tiny", "--steps", "5")
    command.wait_for(lambda: "event='profile started'" in (run / "logs" / "critic.log").read_text())
    os.kill(command.child("critic"), signal.SIGKILL)
    result = profiling.wait()
    assert result.code == 0, result
    assert "critic: incomplete: " in result.out
    assert "not under way in this process, which has been restarted" in result.out
    assert "actor (cpu): " in result.out
    step = committed_steps(run)
    command.wait_for(lambda: committed_steps(run) > step)


def test_processes_report_their_devices_and_what_cannot_be_profiled_is_refused_with_status_2(
    start: Start, call: Call, config: Path, frozen: Service, tmp_path: Path
) -> None:
    assert call("profile", "runs/tiny", "--steps", "11").code == 2
    assert call("profile", "runs/tiny", "--steps", "0").code == 2
    unknown = call("profile", "runs/tiny")
    assert (unknown.code, "is not the directory of a run" in unknown.err) == (2, True)
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS)
    address, token = dashboard_link(command)
    run = tmp_path / "runs" / "tiny"
    command.wait_for(lambda: committed_steps(run) >= 1)

    def devices(role: str) -> list[dict[str, Any]]:
        services = get(address, token, "/runs/tiny/services").json()
        return [device for service in services if service["role"] == role for device in service["devices"]]

    for role in ("orchestrator", "actor", "critic"):
        [reading] = command.wait_for(lambda role=role: devices(role))  # type: ignore[misc]
        assert reading["name"] == "cpu"
        assert 0 <= reading["busy"] <= 1
        assert 0 < reading["memory_used_bytes"] < reading["memory_total_bytes"]
        assert reading["power_watts"] is None
    command.wait_for(lambda: '"device_busy_actor"' in (run / "metrics.jsonl").read_text())
    command.wait_for(lambda: '"devices"' in (run / "timeline.jsonl").read_text())
    assert call("pause", "runs/tiny").code == 0
    waiting = start("profile", "runs/tiny", "--steps", "1")
    waiting.wait_for(lambda: "profiles the next 1 step" in waiting.out)
    second = call("profile", "runs/tiny")
    assert (second.code, "a profile is under way already" in second.err) == (2, True), second
    assert call("resume", "runs/tiny").code == 0
    assert waiting.wait().code == 0
