"""Schemathesis over the OpenAPI document: every generated request gets a documented response and no server error.

These tests send a few requests per method. The slow one sends ten thousand requests to a gateway process.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quartet.gateway.__main__ import OPERATOR_TOKEN_VARIABLE
from tests.fuzz.monitoring import ResourceUsage, resource_usage
from tests.gateway.live_runs import eventually, start_live_run
from tests.gateway.serving import TOKEN, Gateway, serving
from tests.gateway.test_process import Process
from tests.training.conftest import MakeConfig
from tests.training.runs import Run

EXAMPLES = int(os.environ.get("QUARTET_FUZZ_EXAMPLES", "2"))
"""Requests per method."""
MIN_REQUESTS = 10_000
"""Required number of requests in total."""
TIMEOUT = 2.0
"""Maximum response time of the health check under load, in seconds."""
MAX_MEMORY_GROWTH = 30.0
"""Maximum memory growth after the first requests of each kind, in MiB. It allows for caches and allocators. A leak of 2 kB per
request would add 20 MiB in 10,000 requests."""
MAX_FILE_GROWTH = 2
"""Additional open files: current connections."""
MAX_THREAD_GROWTH = 8
"""Additional threads: pools start threads on demand."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
STREAM_PATH = "/api/v1/runs/{run}/events"
LIVE_RUN_PATHS = {
    "/api/v1/runs/{run}" + path
    for path in ("", "/pause", "/resume", "/checkpoint", "/rollback", "/settings", "/services", "/buffer", "/audit")
}


def test_generated_requests_get_documented_responses(run_gateway: Gateway) -> None:
    responses = send_generated_requests(run_gateway.address, "finished", lambda path: path != STREAM_PATH)
    assert len({path for path, _ in responses}) > 20
    statuses = [status for _, status in responses]
    assert statuses.count(200) >= 15
    assert set(statuses) - {200, 202} <= {400, 401, 403, 404, 405, 409, 422, 429}
    assert run_gateway.client.get("/runs/finished").status_code == 200


@pytest.mark.slow
def test_generated_commands_to_an_active_run_get_documented_responses(make: MakeConfig, tmp_path: Path) -> None:
    with start_live_run(make, tmp_path, "active", steps=100_000) as (active, _), serving(tmp_path) as gateway:
        active.control.pause()
        eventually(active.board.current, lambda progress: progress.state == "paused")
        responses = send_generated_requests(gateway.address, "active", lambda path: path in LIVE_RUN_PATHS)
        assert {path for path, _ in responses} == LIVE_RUN_PATHS
        assert {status for _, status in responses} <= {200, 202, 404, 405, 422}
        for command in ("pause", "resume", "checkpoint"):
            assert (f"/api/v1/runs/{{run}}/{command}", 202) in responses
        assert gateway.client.get("/runs/active").json()["live"]


@pytest.mark.slow
def test_ten_thousand_requests_do_not_leak_resources(finished_run: Run, make: MakeConfig, tmp_path: Path) -> None:
    examples = max(EXAMPLES, 350)
    shutil.copytree(finished_run.files.root, tmp_path / "finished")
    with start_live_run(make, tmp_path, "active", steps=100_000) as (active, _), process(tmp_path) as (address, pid):
        active.control.pause()
        eventually(active.board.current, lambda progress: progress.state == "paused")

        def send(examples: int) -> list[tuple[str, int]]:
            finished_responses = send_generated_requests(
                address, "finished", lambda path: path != STREAM_PATH, examples
            )
            return finished_responses + send_generated_requests(
                address, "active", lambda path: path in LIVE_RUN_PATHS, examples
            )

        send(max(1, examples // 5))
        before = resource_usage(pid, 0)
        with health_checks(address) as problems:
            responses = send(examples)
        after = resource_usage(pid, len(responses))
    counts = Counter(status for _, status in responses)
    print(f"{len(responses)} requests, by status {dict(counts)}; before {before}, after {after}")
    assert len(responses) >= MIN_REQUESTS
    assert problems == []
    assert all(status < 500 or status == 503 for status in counts)
    assert isinstance(before, ResourceUsage)
    assert isinstance(after, ResourceUsage), "the gateway's process has ended"
    assert after.memory - before.memory < MAX_MEMORY_GROWTH
    assert after.files - before.files <= MAX_FILE_GROWTH
    assert after.threads <= before.threads + MAX_THREAD_GROWTH


@contextmanager
def process(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a gateway process; yield its address and process id."""
    tree = yaml.safe_load((folder / "finished" / "config.yaml").read_text())
    tree["run"]["directory"] = str(folder)
    tree["gateway"] = {"start_runs": False, "max_requests_per_second": 100_000}
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump(tree))
    with (folder / "gateway.log").open("wb") as log:
        gateway = Process("--config", str(config), output=log, **{OPERATOR_TOKEN_VARIABLE: TOKEN})
        try:
            yield gateway.message()["address"], gateway.process.pid
        finally:
            gateway.close()


@contextmanager
def health_checks(address: str) -> Iterator[list[str]]:
    """Check the gateway's health every second; yield the list of late or failed responses."""
    problems: list[str] = []
    done = threading.Event()

    def check() -> None:
        while not done.wait(1.0):
            started = time.monotonic()
            try:
                status = httpx2.get(f"http://{address}/healthz", timeout=TIMEOUT).status_code
            except httpx2.HTTPError as error:
                problems.append(repr(error))
                continue
            if status != 200 or time.monotonic() - started > TIMEOUT:
                problems.append(f"{status} after {time.monotonic() - started:.1f} s")

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    try:
        yield problems
    finally:
        done.set()
        thread.join()


def send_generated_requests(
    address: str, run: str, selects: Callable[[str], bool], examples: int = EXAMPLES
) -> list[tuple[str, int]]:
    """Send generated requests for the selected paths, most of them for ``run``. Return path and status of each."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    document = httpx2.get(f"http://{address}/api/v1/openapi.json", headers=headers).json()
    schema = schemathesis.openapi.from_dict(document)
    responses: list[tuple[str, int]] = []
    for operation in (result.ok() for result in schema.get_all_operations()):
        if not selects(operation.path):
            continue

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def send(case: schemathesis.Case) -> None:
            # Most requests use the existing run: other names are refused early.
            if case.path_parameters and "run" in case.path_parameters and len(case.path_parameters["run"]) % 3:
                case.path_parameters["run"] = run
            response = case.call_and_validate(base_url=f"http://{address}", headers=headers, checks=CHECKS, timeout=20)
            responses.append((case.operation.path, response.status_code))

        given(operation.as_strategy())(send)()
    return responses
