"""A real gateway process as the launcher holds it: asked whether it lives, started again, its token kept to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.config import Config, parse_config
from quartet.errors import ConfigError
from quartet.launcher.gateway_process import NICENESS, TOKEN, GatewayProcess
from quartet.run_directory.run_files import RunFiles

PATIENCE = 60.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run that has not begun; its folder is there."""
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
    gateway = GatewayProcess.of_run(
        config, RunFiles(config.run_directory).config, "redis://nowhere/0", tmp_path / "gateway.log"
    )
    try:
        gateway.wait_until_ready(PATIENCE)
        yield gateway
    finally:
        gateway.reap(time.monotonic())


def test_it_answers_unless_it_stands_still_and_comes_back_where_it_was(gateway: GatewayProcess) -> None:
    assert gateway.answers(PATIENCE)
    assert os.getpriority(os.PRIO_PROCESS, gateway.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    os.kill(gateway.process.pid, signal.SIGSTOP)
    assert not gateway.answers(0.2)
    link = gateway.link()
    gateway.process.kill()
    gateway.process.wait()
    assert not gateway.answers(0.2)
    gateway.begin()
    gateway.wait_until_ready(PATIENCE)
    assert gateway.link() == link
    assert gateway.link("tiny") == link.replace("#token=", "#/runs/tiny/overview&token=")


def test_a_token_of_the_user_s_is_not_printed_and_one_that_is_too_short_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "short")
    gateway = GatewayProcess.of_run(
        config, RunFiles(config.run_directory).config, "redis://nowhere/0", tmp_path / "gateway.log"
    )
    try:
        with pytest.raises(ConfigError, match=rf"^gateway: {TOKEN}: has 5 characters; expected at least 16"):
            gateway.wait_until_ready(PATIENCE)
        gateway.address = "0.0.0.0:8080"
        assert (gateway.link(), gateway.link("tiny")) == (
            "http://127.0.0.1:8080/",
            "http://127.0.0.1:8080/#/runs/tiny/overview",
        )
    finally:
        gateway.reap(time.monotonic())
