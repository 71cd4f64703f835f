"""Logs: one line per event, and no error if a line cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from quartet.contract.status import Role
from quartet.telemetry.logs import configure_logs, file_log

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "exception", "critical"])
def test_a_line_has_time_level_role_and_event(level: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    configure_logs("actor")
    getattr(structlog.get_logger(), level)("saved", step=20)
    getattr(file_log("launcher", tmp_path / "log"), level)("restarted", attempt=2)
    shown = "error" if level == "exception" else level
    assert f"level='{shown}' role='actor' event='saved' step=20" in capsys.readouterr().err
    assert f"level='{shown}' role='launcher' event='restarted' attempt=2" in (tmp_path / "log").read_text()


def test_a_role_is_shown_as_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("tests")
    structlog.get_logger().info("waiting", service=Role.ACTOR, all=(Role.CRITIC,), seconds={Role.REWARD: 1})
    assert capsys.readouterr().err.endswith("service='actor' all=['critic'] seconds={'reward': 1}\n")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_loses_only_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FULL.open("w", buffering=1)
    monkeypatch.setattr("sys.stderr", full)
    configure_logs("actor")
    for number in range(1000):
        structlog.get_logger().warning("call refused", number=number)
    file_log("launcher", FULL).error("restarted")
    with pytest.raises(OSError, match="No space left"):
        full.close()
