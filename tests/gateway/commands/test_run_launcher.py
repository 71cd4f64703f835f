"""Runs started over the API train in separate processes. An invalid config is refused with its field and starts nothing."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.gateway.commands import run_launcher
from quartet.gateway.commands.audit_log import write_entry
from tests.gateway.serving import Gateway, create_run, serving
from tests.training.runs import json_lines
from tests.waiting import LIMIT


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(run_launcher, "START_TIMEOUT_SECONDS", LIMIT)
    with serving(tmp_path, start_runs=True) as result:
        yield result


@pytest.fixture(scope="module")
def invalid_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that only receives invalid requests, so its folder stays empty."""
    with serving(tmp_path_factory.mktemp("invalid"), start_runs=True) as result:
        yield result


@pytest.fixture
def tree(toy_task_tree: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    result = toy_task_tree()
    result["run"] = {"name": "started", "steps": 1, "directory": "/elsewhere"}
    return result


def start(gateway: Gateway, tree: dict[str, Any], **more: Any) -> Any:
    content = json.dumps({"config": tree, **more})
    return gateway.client.post("/runs", content=content, headers={"content-type": "application/json"}, timeout=LIMIT)


def fields(response: Any) -> list[str]:
    return [item["field"] for item in response.json()["fields"]]


def test_a_run_is_started_in_a_separate_process(
    gateway: Gateway, tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The new run must not use the Redis of the run of this gateway.
    monkeypatch.setenv("QUARTET_BUFFER_URL", "redis://127.0.0.1:1/0")
    # Enough steps that the run is active until the interrupt.
    tree["run"]["steps"] = 1_000_000
    # A run without steps has this name already. Its audit log is kept.
    files = create_run(tmp_path, "started")
    write_entry(files, "operator 127.0.0.1", "stop", {"name": "started"}, "accepted")
    response = start(gateway, tree)
    process = gateway.app.state.run_launcher.processes()["started"]
    try:
        assert response.status_code == 201, response.text
        assert (response.json()["name"], response.json()["total_steps"]) == ("started", 1_000_000)
        assert response.json()["state"] in ("starting", "training")
        # Signals of the terminal of the gateway do not reach another session.
        assert os.getsid(process.pid) == process.pid
        environment = Path(f"/proc/{process.pid}/environ").read_text()
        assert "QUARTET_BUFFER_URL" not in environment
        config = gateway.client.get("/runs/started/config").json()["config"]
        assert config["gateway"]["enabled"] is False
        assert config["run"]["directory"] == str(tmp_path)
        refused = start(gateway, tree)
        assert refused.status_code == 409
        assert process.poll() is None
    finally:
        # SIGTERM, because background processes of a shell ignore SIGINT.
        process.terminate()
        try:
            code = process.wait(LIMIT)
        finally:
            process.kill()
        assert code == 130, (files.logs / "quartet.log").read_text()
    audit = json_lines(files.audit)
    assert [(line["command"], line["details"]["name"]) for line in audit] == [
        ("stop", "started"),
        ("start", "started"),
        ("start", "started"),
    ]
    assert audit[1]["outcome"] == "accepted"
    assert "is already active" in audit[2]["outcome"]
    assert gateway.client.get("/runs/started").json()["live"] is False


def test_a_slow_check_of_inputs_is_reported_and_does_not_stop_the_run(
    gateway: Gateway, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_launcher, "START_TIMEOUT_SECONDS", 0.0)
    response = start(gateway, tree)
    process = gateway.app.state.run_launcher.processes()["started"]
    try:
        assert response.status_code == 504
        assert "GET /runs/started answers once it trains" in response.json()["detail"]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(LIMIT)


@pytest.mark.parametrize(
    ("section", "key", "value", "field"),
    [
        ("run", "steps", 0, "body.config.run.steps"),
        ("run", "stepz", 1, "body.config.run.stepz"),
        ("run", "name", "../up", "body.config.run.name"),
        ("algorithm", "estimator", "magic", "body.config.algorithm.estimator"),
        ("actor", "model", None, "body.config.actor.model"),
        ("evaluation", "every_steps", 2, "body.config"),
        ("gateway", "port", 1, "body.config.gateway.port"),
    ],
)
def test_an_invalid_config_is_refused_with_its_field(
    invalid_gateway: Gateway, tree: dict[str, Any], section: str, key: str, value: Any, field: str
) -> None:
    invalid = copy.deepcopy(tree)
    invalid.setdefault(section, {})[key] = value
    response = start(invalid_gateway, invalid)
    assert response.status_code == 422
    assert fields(response) == [field]
    assert list(invalid_gateway.app.state.catalog.folder.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"run": 3},
        {"run": {"name": 7}},
        {"run": {"steps": 1}},
        {"run": {"name": "x"}, "data": []},
        {"run": {"name": "x", "\ud800": 1}},
    ],
)
def test_a_malformed_config_is_refused(invalid_gateway: Gateway, config: dict[str, Any]) -> None:
    response = start(invalid_gateway, config)
    assert response.status_code == 422
    assert fields(response)
    assert list(invalid_gateway.app.state.catalog.folder.iterdir()) == []


def test_missing_inputs_are_reported_with_the_error_of_the_run(
    gateway: Gateway, tree: dict[str, Any], tmp_path: Path
) -> None:
    tree["data"]["prompts"] = str(tmp_path / "nowhere.jsonl")
    response = start(gateway, tree)
    assert response.status_code == 422
    assert "nowhere.jsonl" in response.json()["detail"]
    assert fields(response) == ["body.config"]
    assert gateway.client.get("/runs").json()["items"] == []


def test_a_name_in_use_and_a_missing_run_to_resume_are_refused(
    gateway: Gateway, tree: dict[str, Any], tmp_path: Path
) -> None:
    files = create_run(tmp_path, "started", steps=1)
    before = files.metrics.read_bytes()
    response = start(gateway, tree)
    assert response.status_code == 409
    assert "choose another run.name" in response.json()["detail"]
    assert json_lines(files.audit)[-1]["outcome"].startswith("run directory")
    tree["run"]["name"] = "other"
    response = start(gateway, tree, resume=True)
    assert response.status_code == 409
    assert "no run to resume" in response.json()["detail"]
    assert files.metrics.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started"]


def test_a_gateway_without_permission_starts_no_runs(tmp_path: Path, tree: dict[str, Any]) -> None:
    with serving(tmp_path, start_runs=False) as gateway:
        response = start(gateway, tree)
        assert response.status_code == 403
        assert "start_runs" in response.json()["detail"]
    assert list(tmp_path.iterdir()) == []
