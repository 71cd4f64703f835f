"""Supervision of a real service process that cannot start: the user sees its error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import structlog

from quartet.config.deployment import RecoveryConfig
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.service_process import ServiceProcess
from quartet.launcher.supervisor import ProcessSupervisor


@pytest.mark.parametrize(
    ("restarts", "kind", "message"),
    [
        (0, ConfigError, r"^reward: config .*missing\.yaml: .*"),
        (
            1,
            ServiceFailed,
            r"^reward: given up after 1 restart in \d+ s \(recovery\.max_restarts 1\): config .*missing\.yaml: .*",
        ),
    ],
)
def test_the_user_sees_the_error_of_a_service_that_refuses_its_config(
    restarts: int, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    service = ServiceProcess(
        "reward",
        ["quartet.services", "reward", "--config", str(tmp_path / "missing.yaml")],
        environment,
        tmp_path / "reward.log",
    )
    recovery = RecoveryConfig(max_restarts=restarts, backoff_seconds=0.05)
    supervisor = ProcessSupervisor(service, recovery, 600.0, structlog.wrap_logger(structlog.ReturnLogger()))
    messages: list[str] = []
    try:
        with pytest.raises(kind, match=message):
            poll_until_it_raises(supervisor, messages)
    finally:
        supervisor.stop()
        service.wait_or_kill(time.monotonic())
    assert all(line.startswith("reward: ended with status 2 (config ") for line in messages)
    assert [line[-len("restarted (1 of 1 in a row)") :] for line in messages] == [
        "restarted (1 of 1 in a row)"
    ] * restarts


def poll_until_it_raises(supervisor: ProcessSupervisor, messages: list[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        messages += supervisor.poll()
        time.sleep(0.01)
