"""Frozen models at addresses: the run uses the replicas that respond, and starts and stops none."""

from __future__ import annotations

import json
from pathlib import Path

from grpc_health.v1 import health_pb2

from tests.e2e.commands import settings
from tests.e2e.conftest import Run, Service, Start, health, step_metrics, weights

ABSENT = "127.0.0.1:1"


def test_a_run_with_replicas_of_which_one_responds_has_the_bits_of_one_that_starts_its_services(
    start: Start, config: Path, frozen: Service, first_run: Run, tmp_path: Path
) -> None:
    addresses = json.dumps([ABSENT, frozen.address])
    options = settings(*(f"services.{role}.address={addresses}" for role in ("reward", "reference")))
    result = start("train", config, *options, *settings("gateway.enabled=false")).wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    for role in ("reward", "reference"):
        assert f"{role} at {ABSENT} does not respond; the other replicas do its work" in result.out
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(first_run)
    assert weights(run.directory) == weights(first_run.directory)
    assert not (run.directory / "logs" / "reward.log").exists(), "the command started a service that has an address"
    assert health(frozen.address) == health_pb2.HealthCheckResponse.SERVING, (
        "the run stopped a service that it did not start"
    )
