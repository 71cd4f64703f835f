"""Schemathesis over the OpenAPI document: whatever is sent, the answer is one that the document has, and no server error.

A handful of requests for each method here; ``make fuzz-api`` sends hundreds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.serving import TOKEN, Gateway, serving
from tests.gateway.test_live import eventually, live
from tests.training.conftest import MakeConfig

EXAMPLES = int(os.environ.get("QUARTET_FUZZ_EXAMPLES", "2"))
"""Requests for each method."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = "/api/v1/runs/{run}/events"
OF_A_LIVE_RUN = {
    "/api/v1/runs/{run}" + path
    for path in ("", "/pause", "/resume", "/checkpoint", "/rollback", "/settings", "/services", "/buffer", "/audit")
}


def test_whatever_is_sent_the_answer_is_one_that_the_document_has(shown: Gateway) -> None:
    answered = send_what_the_document_allows(shown, "whole", lambda path: path != ENDLESS)
    assert len({path for path, _ in answered}) > 20
    statuses = [status for _, status in answered]
    assert statuses.count(200) >= 15
    assert set(statuses) - {200, 202} <= {400, 401, 403, 404, 405, 409, 422, 429}
    assert shown.client.get("/runs/whole").status_code == 200


def test_whatever_is_commanded_of_a_run_that_goes_on_too(make: MakeConfig, tmp_path: Path) -> None:
    with live(make, tmp_path, "going", steps=100_000) as (going, _), serving(tmp_path) as gateway:
        going.control.pause()
        eventually(going.board.current, lambda progress: progress.state == "paused")
        answered = send_what_the_document_allows(gateway, "going", lambda path: path in OF_A_LIVE_RUN)
        assert {path for path, _ in answered} == OF_A_LIVE_RUN
        assert {status for _, status in answered} <= {200, 202, 404, 405, 422}
        for command in ("pause", "resume", "checkpoint"):
            assert (f"/api/v1/runs/{{run}}/{command}", 202) in answered
        assert gateway.client.get("/runs/going").json()["live"]


def send_what_the_document_allows(gateway: Gateway, run: str, wanted: Callable[[str], bool]) -> list[tuple[str, int]]:
    """Requests of every method of the wanted paths, most of them for ``run``; of each its path and its answer's status."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    document = httpx2.get(f"http://{gateway.address}/api/v1/openapi.json", headers=headers).json()
    schema = schemathesis.openapi.from_dict(document)
    answered: list[tuple[str, int]] = []
    for operation in (found.ok() for found in schema.get_all_operations()):
        if not wanted(operation.path):
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def send(case: schemathesis.Case) -> None:
            # The run that there is, in most requests: another name never gets far.
            if case.path_parameters and "run" in case.path_parameters and len(case.path_parameters["run"]) % 3:
                case.path_parameters["run"] = run
            answer = case.call_and_validate(
                base_url=f"http://{gateway.address}", headers=headers, checks=CHECKS, timeout=20
            )
            answered.append((case.operation.path, answer.status_code))

        given(operation.as_strategy())(send)()
    return answered
