"""The order in which a run's processes start. Training never waits for the gateway."""

from __future__ import annotations

import os
import signal
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.launcher import launcher as module
from quartet.launcher.gateway_process import GatewayProcess
from quartet.launcher.launcher import Launcher
from quartet.launcher.service_process import ServiceProcess
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


def test_the_start_names_a_reward_service_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as listening:
        bound.bind(("127.0.0.1", 0))  # No server listens.
        dead, alive = (f"127.0.0.1:{each.getsockname()[1]}" for each in (bound, listening))
        parts = [
            {"name": name, "source": "service", "service": {"address": address, "start_timeout_seconds": 40}}
            for name, address in (("dead", dead), ("alive", alive))
        ]
        config = parse_config(
            {
                "run": {"name": "tiny", "directory": str(tmp_path)},
                "data": {"prompts": "p"},
                "actor": {"model": "a"},
                "critic": {"model": "c"},
                "reward": {"source": "ensemble", "parts": parts},
                "gateway": {"enabled": False},
                "buffer": {"url": "redis://nowhere/0"},
                "services": {role: {"address": "far:1"} for role in ("actor", "critic", "reference")},
            },
            "here",
        )
        files = RunFiles(config.run_directory)
        files.write_config(config.to_yaml())
        files.logs.mkdir(exist_ok=True)
        interrupted, lines = threading.Event(), []

        def report(line: str) -> None:
            lines.append(line)
            if "dead" in line:
                interrupted.set()

        monkeypatch.setattr(module, "WAITING_REPORT_SECONDS", 0.0)
        monkeypatch.setattr(module, "PRELOADED", ())
        monkeypatch.setattr(Launcher, "_start_buffer", lambda _: None)
        with Launcher(config, files.config, interrupted) as launcher, pytest.raises(KeyboardInterrupt):
            launcher.start(report=report)
        assert lines[-1] == (
            f"reward: waits up to 40 s for reward.parts.dead.service.address {dead}, where no server answers; "
            "start it, or correct the address"
        )
        assert not any(alive in line for line in lines)


LOADING = """
import json, os, pathlib, signal, sys, time
first = pathlib.Path(__file__).with_suffix(".started")
if not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
os.write(int(sys.argv[-1]), json.dumps({"address": "127.0.0.1:1"}).encode() + b"\\n")
time.sleep(600)
"""


def test_a_service_that_is_stopped_while_it_loads_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text(LOADING)
    config = parse_config(
        {
            "run": {"name": "tiny", "directory": str(tmp_path)},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "recovery": {"hang_timeout_seconds": 0.3, "backoff_seconds": 0.01},
        },
        "here",
    )
    with Launcher(config, tmp_path / "config.yaml") as launcher:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        launcher._services.append(ServiceProcess("critic", ["loading"], environment, tmp_path / "critic.log"))
        launcher._wait_until_ready(lambda _: None)
        assert launcher._messages == ["critic: killed by SIGKILL; restarted (1 of 5 in a row)"]
        launcher._services[0].process.kill()
