"""The order in which a run's processes start. Training never waits for the gateway."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.launcher import launcher as module
from quartet.launcher.gateway_process import GatewayProcess
from quartet.launcher.launcher import Launcher
from quartet.rpc.security.certificates import Authority
from quartet.run_directory.run_files import RunFiles


def test_training_starts_without_a_gateway_that_hangs_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(
        {
            "run": {"name": "tiny", "directory": str(tmp_path)},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "buffer": {"url": "redis://nowhere/0"},
            "services": {role: {"address": "far:1"} for role in ("actor", "critic", "reward", "reference")},
        },
        "here",
    )
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    files.logs.mkdir(exist_ok=True)
    real = GatewayProcess.for_run
    gateways: list[GatewayProcess] = []

    def hanging(*arguments: object) -> GatewayProcess:
        gateways.append(real(*arguments))  # type: ignore[arg-type]
        os.kill(gateways[0].process.pid, signal.SIGSTOP)
        return gateways[0]

    started: list[tuple[Role, int | None]] = []
    monkeypatch.setattr(GatewayProcess, "for_run", hanging)
    monkeypatch.setattr(module, "GATEWAY_START_SECONDS", 0.1)
    monkeypatch.setattr(Launcher, "_start_buffer", lambda _: None)
    # No service starts. The test records the attempts, and whether the gateway had ended before.
    monkeypatch.setattr(
        Launcher, "_start_service", lambda _, role, __: started.append((role, gateways[0].process.returncode))
    )
    with Launcher(config, files.config) as launcher:
        launcher.start()
        assert started == [(Role.ORCHESTRATOR, -signal.SIGKILL)]
        assert launcher.dashboard_link is None
        assert launcher.check() == [
            f"gateway: not ready within 0.1 s; the run continues without it, see {files.logs / 'gateway.log'}"
        ]


def test_certificates_of_two_authorities_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for process in ("operator", "actor", "critic", "reward", "reference", "orchestrator", "gateway"):
        Authority(timedelta(days=1)).issue(tmp_path / "certificates" / process, [f"{process}.quartet"])
    config = parse_config(
        {
            "run": {"name": "tiny", "directory": str(tmp_path)},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "security": {"certificates": str(tmp_path / "certificates")},
        },
        "here",
    )
    with Launcher(config, tmp_path / "config.yaml") as launcher:
        with pytest.raises(ConfigError, match=r"certificates.actor has another authority than .*operator"):
            launcher.start()
        assert launcher.addresses == {}
