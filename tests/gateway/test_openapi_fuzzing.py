"""Schemathesis over the OpenAPI document: every generated request gets a documented response and no server error.

These tests send a few requests per method. ``make fuzz-api`` sends ten thousand requests to a gateway process.
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
from tests.gateway.live_runs import eventually, live
from tests.gateway.serving import TOKEN, Gateway, serving
from tests.gateway.test_process import Process
from tests.training.conftest import MakeConfig
from tests.training.runs import Run

EXAMPLES = int(os.environ.get("QUARTET_FUZZ_EXAMPLES", "2"))
"""Requests per method."""
ENOUGH = 10_000
"""Minimum number of requests in total."""
PATIENCE = 2.0
"""Maximum response time of the health check under load, in seconds."""
MORE_MEMORY = 30.0
"""Maximum memory growth after the first requests of each kind, in MiB. It covers caches and allocators. A leak of the 2 kB of
each request would add 20 MiB in 10,000 requests."""
MORE_FILES = 2
"""Additional open files: current connections."""
MORE_THREADS = 8
"""Additional threads: pools start threads on demand."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = "/api/v1/runs/{run}/events"
OF_A_LIVE_RUN = {
    "/api/v1/runs/{run}" + path
    for path in ("", "/pause", "/resume", "/checkpoint", "/rollback", "/settings", "/services", "/buffer", "/audit")
}


def test_generated_requests_get_documented_responses(shown: Gateway) -> None:
    answered = send_generated_requests(shown.address, "whole", lambda path: path != ENDLESS)
    assert len({path for path, _ in answered}) > 20
    statuses = [status for _, status in answered]
    assert statuses.count(200) >= 15
    assert set(statuses) - {200, 202} <= {400, 401, 403, 404, 405, 409, 422, 429}
    assert shown.client.get("/runs/whole").status_code == 200


def test_generated_commands_to_an_active_run_get_documented_responses(make: MakeConfig, tmp_path: Path) -> None:
    with live(make, tmp_path, "going", steps=100_000) as (going, _), serving(tmp_path) as gateway:
        going.control.pause()
        eventually(going.board.current, lambda progress: progress.state == "paused")
        answered = send_generated_requests(gateway.address, "going", lambda path: path in OF_A_LIVE_RUN)
        assert {path for path, _ in answered} == OF_A_LIVE_RUN
        assert {status for _, status in answered} <= {200, 202, 404, 405, 422}
        for command in ("pause", "resume", "checkpoint"):
            assert (f"/api/v1/runs/{{run}}/{command}", 202) in answered
        assert gateway.client.get("/runs/going").json()["live"]


@pytest.mark.slow
def test_ten_thousand_requests_do_not_leak_resources(ended: Run, make: MakeConfig, tmp_path: Path) -> None:
    examples = max(EXAMPLES, 350)
    shutil.copytree(ended.files.root, tmp_path / "whole")
    with live(make, tmp_path, "going", steps=100_000) as (going, _), process(tmp_path) as (address, pid):
        going.control.pause()
        eventually(going.board.current, lambda progress: progress.state == "paused")

        def send(examples: int) -> list[tuple[str, int]]:
            wholes = send_generated_requests(address, "whole", lambda path: path != ENDLESS, examples)
            return wholes + send_generated_requests(address, "going", lambda path: path in OF_A_LIVE_RUN, examples)

        send(max(1, examples // 5))
        before = resource_usage(pid, 0)
        with answering(address) as late:
            answered = send(examples)
        after = resource_usage(pid, len(answered))
    counts = Counter(status for _, status in answered)
    print(f"{len(answered)} requests, by status {dict(counts)}; before {before}, after {after}")
    assert len(answered) >= ENOUGH
    assert late == []
    assert all(status < 500 or status == 503 for status in counts)
    assert isinstance(before, ResourceUsage)
    assert isinstance(after, ResourceUsage), "the gateway's process has ended"
    assert after.memory - before.memory < MORE_MEMORY
    assert after.files - before.files <= MORE_FILES
    assert after.threads <= before.threads + MORE_THREADS


@contextmanager
def process(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a gateway process; yield its address and process id."""
    tree = yaml.safe_load((folder / "whole" / "config.yaml").read_text())
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
def answering(address: str) -> Iterator[list[str]]:
    """Check the gateway's health every second; yield the list of late or failed responses."""
    late: list[str] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(1.0):
            started = time.monotonic()
            try:
                status = httpx2.get(f"http://{address}/healthz", timeout=PATIENCE).status_code
            except httpx2.HTTPError as error:
                late.append(repr(error))
                continue
            if status != 200 or time.monotonic() - started > PATIENCE:
                late.append(f"{status} after {time.monotonic() - started:.1f} s")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield late
    finally:
        done.set()
        thread.join()


def send_generated_requests(
    address: str, run: str, wanted: Callable[[str], bool], examples: int = EXAMPLES
) -> list[tuple[str, int]]:
    """Send generated requests for the selected paths, most of them for ``run``. Return path and status of each."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    document = httpx2.get(f"http://{address}/api/v1/openapi.json", headers=headers).json()
    schema = schemathesis.openapi.from_dict(document)
    answered: list[tuple[str, int]] = []
    for operation in (result.ok() for result in schema.get_all_operations()):
        if not wanted(operation.path):
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
            answer = case.call_and_validate(base_url=f"http://{address}", headers=headers, checks=CHECKS, timeout=20)
            answered.append((case.operation.path, answer.status_code))

        given(operation.as_strategy())(send)()
    return answered
