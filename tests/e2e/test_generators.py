"""Runs whose responses come from generator processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.commands import QUARTET, settings
from tests.e2e.conftest import Run, deterministic_metrics, train, weights


def test_two_generators_with_certificates_train_the_same_policy_as_the_actor(
    config: Path, tmp_path: Path, first_run: Run
) -> None:
    subprocess.run([QUARTET, "certificates", tmp_path / "certificates"], capture_output=True, check=True)
    options = settings(
        "rollout.generators=2",
        "services.generator.num_threads=1",
        f"services.generator.python={sys.executable}",
        f"security.certificates={tmp_path / 'certificates'}",
        "gateway.enabled=false",
    )
    run = train(tmp_path, config, *options)
    assert run.result.code == 0, run.result
    assert weights(run.directory) == weights(first_run.directory)
    assert deterministic_metrics(run) == deterministic_metrics(first_run)
    logs = [(run.directory / "logs" / f"generator-{index}.log").read_text() for index in range(2)]
    assert all("event='ready'" in log for log in logs)
    launcher = (run.directory / "logs" / "launcher.log").read_text()
    assert "restarted" not in launcher
