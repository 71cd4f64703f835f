"""Commands to an active run take effect, or are refused if they are invalid. The audit log contains both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.run_directory.run_files import RunFiles
from tests.gateway.live_runs import eventually, start_live_run
from tests.gateway.serving import Gateway, create_run, serving
from tests.training.conftest import MakeConfig
from tests.training.runs import ActiveRun, json_lines


@pytest.fixture(scope="module")
def active(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActiveRun]:
    with start_live_run(make, tmp_path_factory.mktemp("commanded"), "commanded") as (result, _):
        yield result


@pytest.fixture(scope="module")
def gateway(active: ActiveRun) -> Iterator[Gateway]:
    with serving(active.config.run.directory) as result:
        yield result


def audit(active: ActiveRun) -> list[tuple[str, dict[str, Any], str]]:
    lines = json_lines(RunFiles(active.config.run_directory).audit)
    assert {line["user"] for line in lines} == {"operator 127.0.0.1"}
    return [(line["command"], line["details"], line["outcome"]) for line in lines]


def pause(active: ActiveRun, gateway: Gateway) -> int:
    """Pause the run; return the last committed step."""
    response = gateway.client.post("/runs/commanded/pause")
    assert response.status_code == 202
    assert "pauses" in response.json()["detail"]
    return int(eventually(active.board.current, lambda progress: progress.state == "paused").step)


def test_a_run_pauses_and_resumes(active: ActiveRun, gateway: Gateway) -> None:
    step = pause(active, gateway)
    assert gateway.client.post("/runs/commanded/resume").status_code == 202
    eventually(active.board.current, lambda progress: progress.step > step)
    assert [command for command, _, outcome in audit(active) if outcome == "accepted"][-2:] == ["pause", "resume"]


def test_a_profile_is_recorded_and_listed_and_says_which_services_cannot_profile(
    active: ActiveRun, gateway: Gateway
) -> None:
    """The services of this run, which share a process, do not profile."""
    step = active.board.current().step
    response = gateway.client.post("/runs/commanded/profile", json={"steps": 2})
    assert (response.status_code, response.json()["detail"]) == (202, "run commanded profiles the next 2 steps")
    [profile] = eventually(lambda: gateway.client.get("/runs/commanded/profiles").json(), bool)
    assert profile["step"] > step
    assert profile["last_step"] == profile["step"] + 1
    assert [service["service"] for service in profile["services"]] == ["actor", "critic"]
    assert all(service["problem"] and service["file"] is None for service in profile["services"])
    assert audit(active)[-1] == ("profile", {"steps": 2}, "accepted")


@pytest.mark.parametrize("steps", [0, 11, 1.5, "2"])
def test_a_profile_of_a_wrong_number_of_steps_is_refused(gateway: Gateway, steps: object) -> None:
    response = gateway.client.post("/runs/commanded/profile", json={"steps": steps})
    assert response.status_code == 422
    assert response.json()["fields"][0]["field"] == "body.steps"


def test_a_changed_setting_applies_to_the_next_step(active: ActiveRun, gateway: Gateway) -> None:
    step = pause(active, gateway)
    bounds = {item["name"]: item for item in gateway.client.get("/runs/commanded/settings").json()["settings"]}
    assert set(bounds) == {"kl_coefficient", "actor.learning_rate", "critic.learning_rate"}
    coefficient = bounds["kl_coefficient"]["value"] * 2
    with gateway.stream("commanded") as stream:
        next(iter(stream))
        response = gateway.client.patch(
            "/runs/commanded/settings", json={"kl_coefficient": coefficient, "actor.learning_rate": 2e-3}
        )
        assert response.status_code == 200, response.text
        changes = response.json()["changes"][-2:]
        first = changes[0]["step"]
        assert first in (step + 1, step + 2)
        assert {change["setting"]: change["after"] for change in changes} == {
            "kl_coefficient": coefficient,
            "actor.learning_rate": 2e-3,
        }
        assert {change["user"] for change in changes} == {"operator 127.0.0.1"}
        gateway.client.post("/runs/commanded/resume")
        events = stream.until("step", step=first)
    assert events[-1].data["metrics"]["kl_coefficient"] == coefficient
    assert [event.data["setting"] for event in events if event.kind == "change"] == [
        change["setting"] for change in changes
    ]
    assert ("set", {"kl_coefficient": coefficient, "actor.learning_rate": 2e-3}, "accepted") in audit(active)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kl_coefficient": 1e9}, "body.kl_coefficient"),
        ({"kl_coefficient": 0.1, "actor.learning_rate": -1.0}, "body.actor.learning_rate"),
        ({"kl_coefficient": "much"}, "body.kl_coefficient"),
        ({"kl_coefficient": True}, "body.kl_coefficient"),
        ({"kl_coefficient": "0.2"}, "body.kl_coefficient"),
        ({"actor_learning_rate": 1e-3}, "body.actor_learning_rate"),
        ({"temperature": 2.0}, "body.temperature"),
        ({}, "body"),
    ],
)
def test_an_invalid_value_is_refused_with_its_field_and_changes_nothing(
    active: ActiveRun, gateway: Gateway, body: dict[str, Any], field: str
) -> None:
    before = gateway.client.get("/runs/commanded/settings").json()["changes"]
    response = gateway.client.patch("/runs/commanded/settings", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert [item["field"] for item in response.json()["fields"]] == [field]
    assert gateway.client.get("/runs/commanded/settings").json()["changes"] == before


def test_true_is_not_a_valid_step(gateway: Gateway) -> None:
    response = gateway.client.post("/runs/commanded/rollback", json={"step": True})
    assert response.status_code == 422
    assert response.json()["fields"][0]["field"] == "body.step"


def test_a_command_succeeds_if_its_audit_entry_cannot_be_written(
    active: ActiveRun, gateway: Gateway, tmp_path: Path
) -> None:
    idle = create_run(tmp_path)
    running = RunFiles(active.config.run_directory).audit
    running.touch()
    running.rename(running.with_suffix(".moved"))
    for path in (running, idle.audit):
        path.mkdir()
    try:
        response = gateway.client.post("/runs/commanded/resume")
    finally:
        running.rmdir()
        running.with_suffix(".moved").rename(running)
    assert response.status_code == 202
    assert "resumes; not recorded in audit.jsonl: Is a directory" in response.json()["detail"]
    with serving(tmp_path) as other:
        assert other.client.post("/runs/some/pause").status_code == 409


def test_only_the_newest_changes_are_returned(tmp_path: Path) -> None:
    files = create_run(tmp_path)
    change = {"setting": "kl_coefficient", "before": 0.1, "after": 0.2, "user": "operator 127.0.0.1", "at": 1.0}
    files.append_changes({**change, "step": step} for step in range(1, 251))
    with serving(tmp_path) as gateway:
        changes = gateway.client.get("/runs/some/settings").json()["changes"]
    assert [item["step"] for item in changes] == list(range(51, 251))


def test_a_checkpoint_is_saved_and_the_run_rolled_back_to_it(active: ActiveRun, gateway: Gateway) -> None:
    refused = gateway.client.post("/runs/commanded/rollback", json={"step": 399})
    assert refused.status_code == 422
    assert refused.json()["fields"][0]["field"] == "body.step"
    assert audit(active)[-1][:2] == ("rollback", {"step": 399})
    assert "no checkpoint" in audit(active)[-1][2]

    with gateway.stream("commanded") as stream:
        next(iter(stream))
        assert gateway.client.post("/runs/commanded/checkpoint").status_code == 202
        step = stream.until("checkpoint")[-1].data["step"]
        # A stream that has not sent a later step would need no rewind.
        stream.until("step", step=step + 1)
        assert gateway.client.post("/runs/commanded/rollback", json={"step": step}).status_code == 202
        stream.until("rewind", step=step)
        stream.until("step", step=step + 1)
    assert [command for command, _, outcome in audit(active) if outcome == "accepted"][-2:] == [
        "checkpoint",
        "rollback",
    ]


def test_an_inactive_run_refuses_commands(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("idle")
    files = create_run(folder, steps=1)
    with serving(folder) as gateway:
        for path, body in (("pause", None), ("stop", None), ("checkpoint", None), ("rollback", {"step": 1})):
            response = gateway.client.post(f"/runs/some/{path}", json=body)
            assert response.status_code == 409
            assert "--resume" in response.json()["detail"]
        assert gateway.client.patch("/runs/some/settings", json={"kl_coefficient": 0.1}).status_code == 409
        assert gateway.client.get("/runs/some/settings").json() == {"settings": [], "changes": []}
        assert gateway.client.post("/runs/other/pause").status_code == 404
        result = gateway.client.get("/runs/some/audit").json()["items"]
    assert [entry["command"] for entry in result] == ["set", "rollback", "checkpoint", "stop", "pause"]
    assert all("not active" in entry["outcome"] for entry in result)
    assert len(json_lines(files.audit)) == 5


def test_a_run_stops(active: ActiveRun, gateway: Gateway) -> None:
    """The last test of the file: it ends the run of the others."""
    with gateway.stream("commanded") as stream:
        next(iter(stream))
        assert gateway.client.post("/runs/commanded/stop").status_code == 202
        stream.until("progress", state="stopped")
        assert active.finish().code == 0
        assert gateway.client.post("/runs/commanded/pause").status_code == 409
