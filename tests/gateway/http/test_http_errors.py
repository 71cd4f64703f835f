"""Errors are problem responses that name the field and reveal no internals."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import APIRouter
from structlog.testing import capture_logs

from quartet import errors
from quartet.gateway.http import http_errors
from tests.every_case import every_case
from tests.gateway.serving import Gateway, create_run, serving


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("runs")
    create_run(folder, steps=2)
    with serving(folder) as result:
        yield result


@every_case(
    ("path", "field", "text"),
    [
        ("/runs?limit=0", "query.limit", "greater than or equal to 1, not '0'"),
        ("/runs?limit=501", "query.limit", "less than or equal to 500"),
        ("/runs?limit=ten", "query.limit", "integer"),
        ("/runs?limt=10", "query.limt", "unknown; known parameters: cursor, limit, state"),
        ("/runs?state=dancing", "query.state", "'training'"),
        ("/runs?cursor=nonsense", "query.cursor", "`next` of the previous page"),
        ("/session?x=1", "query.x", "this path takes none"),
        ("/runs/.hidden", "path.run", "pattern"),
        ("/runs/some/metrics?points=0", "query.points", "greater than or equal to 1"),
        ("/runs/some/metrics?names=kl", "query.names", "has no kl; it has reward_mean"),
        ("/runs/some/metrics?first=5&last=4", "query.first", "at most query.last 4"),
        ("/metrics?runs=", "query.runs", "1 to 20 runs"),
        ("/metrics", "query.runs", "missing"),
        ("/runs/some/steps/0", "path.step", "greater than or equal to 1"),
        ("/runs/some/trajectories?min_score=nan", "query.min_score", "finite"),
        ("/runs/some/trajectories?sort=reward", "query.sort", "'score'"),
        ("/runs/some/trajectories?step=1&last_step=2", "query.step", "cannot be combined"),
        ("/runs/some/trajectories?first_step=3&last_step=2", "query.first_step", "at most query.last_step 2"),
        ("/runs/some/logs/actor?lines=2001", "query.lines", "less than or equal to 2000"),
    ],
)
def test_an_invalid_field_is_named(gateway: Gateway, path: str, field: str, text: str) -> None:
    response = gateway.client.get(path)
    problem = response.json()
    assert response.status_code == 422
    assert response.headers["content-type"] == http_errors.MEDIA_TYPE
    assert (problem["status"], problem["title"]) == (422, "Unprocessable Entity")
    assert [result["field"] for result in problem["fields"]] == [field]
    assert text in problem["fields"][0]["problem"]
    assert field in problem["detail"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/runs/none", "GET /api/v1/runs lists the runs"),
        ("/runs/none/metrics", "no run of this name"),
        ("/runs/none/events", "no run of this name"),
        ("/metrics?runs=some,none", "'none'"),
        ("/runs/some/steps/3", "steps 1 to 2"),
        ("/runs/some/trajectories/1/0/0", "does not exist"),
        ("/runs/some/evaluations/1", "no evaluation"),
        ("/runs/some/logs/actor", "no logs"),
        ("/runs/some/logs/..%2F..%2Fetc%2Fpasswd", "openapi.json"),
        ("/nothing", "openapi.json"),
    ],
)
def test_a_missing_resource_gets_404(gateway: Gateway, path: str, text: str) -> None:
    response = gateway.client.get(path)
    assert response.status_code == 404
    assert text in response.json()["detail"]


def test_an_invalid_body_is_reported_with_its_fields(gateway: Gateway) -> None:
    client = gateway.client
    malformed = client.post("/runs/some/rollback", content="{", headers={"content-type": "application/json"})
    assert malformed.status_code == 422
    assert malformed.json()["fields"][0]["field"] == "body"
    assert "not JSON" in malformed.json()["detail"]
    invalid = client.post("/runs/some/rollback", json={"step": "ten", "x": 1})
    assert {result["field"] for result in invalid.json()["fields"]} == {"body.step", "body.x"}


@pytest.mark.parametrize(("path", "allowed"), [("/runs", {"GET", "POST"}), ("/runs/some", {"GET"})])
def test_an_unsupported_method_gets_405_with_the_allowed_methods(
    gateway: Gateway, path: str, allowed: set[str]
) -> None:
    response = gateway.client.delete(path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    assert "openapi.json" in response.json()["detail"]


def test_long_values_are_shortened_in_errors(gateway: Gateway) -> None:
    response = gateway.client.get("/runs", params={"limit": "9" * 3000})
    assert response.status_code == 422
    assert len(response.text) < 1000


def test_damaged_files_get_409_with_the_line_number(tmp_path: Path) -> None:
    damaged = create_run(tmp_path, "damaged", steps=2)
    damaged.metrics.write_text(damaged.metrics.read_text() + '{"step": 4}\n')
    invalid_config = create_run(tmp_path, "invalid-config", steps=1)
    invalid_config.config.write_text(invalid_config.config.read_text() + "nonsense: 1\n")
    with serving(tmp_path) as gateway:
        response = gateway.client.get("/runs/damaged/metrics")
        assert response.status_code == 409
        assert "metrics.jsonl:3: is not step 3" in response.json()["detail"]
        assert "nonsense" in gateway.client.get("/runs/invalid-config").json()["detail"]
        # Both runs are still listed.
        listed = {run["name"]: run["problem"] for run in gateway.client.get("/runs").json()["items"]}
        assert set(listed) == {"damaged", "invalid-config"}
        assert "is not step 3" in listed["damaged"]
        assert "nonsense" in listed["invalid-config"]


@pytest.mark.parametrize(("name", "path"), [("changes.jsonl", "settings"), ("audit.jsonl", "audit")])
def test_a_line_with_wrong_fields_gets_409_with_the_line_number(tmp_path: Path, name: str, path: str) -> None:
    files = create_run(tmp_path)
    valid_line = {
        "changes.jsonl": {"setting": "kl_coefficient", "before": 1, "after": 2, "step": 1, "user": "me", "at": 1},
        "audit.jsonl": {"at": 1, "user": "me", "command": "stop", "details": {}, "outcome": "accepted"},
    }[name]
    (files.root / name).write_text(json.dumps(valid_line) + '\n{"step": 1}\n')
    with serving(tmp_path) as gateway:
        response = gateway.client.get(f"/runs/some/{path}")
    assert response.status_code == 409
    assert f"{name}:2: " in response.json()["detail"]


def test_the_openapi_document_contains_every_error_status() -> None:
    statuses = {*http_errors.STATUS_OF.values(), 400, 401, 403, 404, 413, 421, 429, 500}
    assert statuses <= http_errors.PROBLEM_RESPONSES.keys()


def test_an_unexpected_exception_gets_500_without_details(tmp_path: Path) -> None:
    failing = APIRouter()

    @failing.get("/api/v1/fails")
    def fails() -> None:
        raise RuntimeError("a secret text")

    with serving(tmp_path) as gateway, capture_logs() as logs:
        gateway.app.include_router(failing)
        response = gateway.client.get("/fails")
    assert response.status_code == 500
    assert response.headers["content-type"] == http_errors.MEDIA_TYPE
    assert "content-security-policy" in response.headers
    assert "secret" not in response.text
    assert "log" in response.json()["detail"]
    assert [(entry["event"], str(entry["exc_info"])) for entry in logs] == [("internal error", "a secret text")]


def test_every_exception_class_has_a_status_or_is_unexpected() -> None:
    unexpected = {
        errors.QuartetError,
        errors.ComputationFailed,
        errors.FunctionFailed,
        errors.OutOfMemory,
        errors.ScorerFailed,
        errors.TooManyEqualGroups,
        errors.TooManyFailedTrajectories,
    }
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.QuartetError)]
    without_status = {kind for kind in kinds if not any(base in http_errors.STATUS_OF for base in kind.__mro__)}
    assert without_status == unexpected
