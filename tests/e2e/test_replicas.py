"""Replicas of frozen models at a list of addresses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.commands import settings
from tests.e2e.conftest import LONGER, Run, Service, Start, deterministic_metrics, weights

ABSENT = "127.0.0.1:1"


def test_a_run_uses_the_replicas_that_respond(
    start: Start, config: Path, frozen: Service, uninterrupted_run: Run, tmp_path: Path
) -> None:
    addresses = json.dumps([ABSENT, frozen.address])
    command = start(
        "train",
        config,
        *LONGER,
        *settings(
            f"services.reward.address={addresses}",
            f"services.reference.address={addresses}",
            "gateway.enabled=false",
        ),
    )
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    for role in ("reward", "reference"):
        assert f"{role} at {ABSENT} does not respond; the other replicas do its work" in result.out
    run = Run(result, tmp_path / "runs" / "tiny")
    assert deterministic_metrics(run) == deterministic_metrics(uninterrupted_run)
    assert weights(run.directory) == weights(uninterrupted_run.directory)
