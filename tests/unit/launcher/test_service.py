"""A real service process under supervision that cannot start again: its words are what the user sees."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import structlog

from quartet.config import RecoveryConfig
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.service_process import ServiceProcess
from quartet.launcher.supervisor import ProcessSupervisor


@pytest.mark.parametrize(
    ("restarts", "kind", "said"),
    [
        (0, ConfigError, r"^reward: config .*missing\.yaml: .*"),
        (1, ServiceFailed, r"^reward: given up after 1 restart in \d+ s: config .*missing\.yaml: .*"),
    ],
)
def test_a_service_that_refuses_its_config_counts_as_crashed_and_its_words_are_kept(
    restarts: int, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    service = ServiceProcess(
        "reward",
        ["quartet.services", "reward", "--config", str(tmp_path / "missing.yaml")],
        environment,
        tmp_path / "reward.log",
    )
    recovery = RecoveryConfig(max_restarts=restarts, backoff_seconds=0.05)
    supervised = ProcessSupervisor(service, recovery, 600.0, structlog.wrap_logger(structlog.ReturnLogger()))
    told: list[str] = []
    try:
        with pytest.raises(kind, match=said):
            look_until_it_raises(supervised, told)
    finally:
        supervised.stop()
        service.reap(time.monotonic())
    assert all(line.startswith("reward: ended with status 2 (config ") for line in told)
    assert [line[-len("restarted (1 of 1 in a row)") :] for line in told] == ["restarted (1 of 1 in a row)"] * restarts


def look_until_it_raises(supervised: ProcessSupervisor, told: list[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told += supervised.look()
        time.sleep(0.01)
