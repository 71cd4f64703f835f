"""A real gateway process: liveness probes, restarts at the same address, its token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.launcher.gateway_process import NICENESS, TOKEN, GatewayProcess
from quartet.run_directory.run_files import RunFiles
from tests.waiting import LIMIT

TIMEOUT = LIMIT


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The config of a run that has not started. Its directory exists."""
    config = parse_config(
        {
            "run": {"name": "tiny", "directory": str(tmp_path)},
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "gateway": {"allowed_hosts": ["box.example"], "start_runs": False},
        },
        "here",
    )
    RunFiles(tmp_path / "tiny").write_config(config.to_yaml())
    return config


@pytest.fixture
def gateway(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    monkeypatch.delenv(TOKEN, raising=False)
    gateway = GatewayProcess.for_run(
        config, RunFiles(config.run_directory).config, "redis://nowhere/0", tmp_path / "gateway.log"
    )
    try:
        gateway.wait_until_ready(TIMEOUT)
        yield gateway
    finally:
        gateway.wait_or_kill(time.monotonic())


@pytest.mark.slow
def test_a_restarted_gateway_keeps_its_address_and_token(gateway: GatewayProcess) -> None:
    assert gateway.responds(TIMEOUT)
    assert os.getpriority(os.PRIO_PROCESS, gateway.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    os.kill(gateway.process.pid, signal.SIGSTOP)
    assert not gateway.responds(0.2)
    link = gateway.link()
    gateway.process.kill()
    gateway.process.wait()
    assert not gateway.responds(0.2)
    gateway.start()
    gateway.wait_until_ready(TIMEOUT)
    assert gateway.link() == link
    assert gateway.link("tiny") == link.replace("#token=", "#/runs/tiny/overview&token=")


def test_the_users_token_is_not_printed_and_a_short_one_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "short")
    gateway = GatewayProcess.for_run(
        config, RunFiles(config.run_directory).config, "redis://nowhere/0", tmp_path / "gateway.log"
    )
    try:
        with pytest.raises(ConfigError, match=rf"^gateway: {TOKEN}: has 5 characters; expected at least 16"):
            gateway.wait_until_ready(TIMEOUT)
        gateway.address = "0.0.0.0:8080"
        assert (gateway.link(), gateway.link("tiny")) == (
            "http://127.0.0.1:8080/",
            "http://127.0.0.1:8080/#/runs/tiny/overview",
        )
    finally:
        gateway.wait_or_kill(time.monotonic())
