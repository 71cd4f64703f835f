"""A Redis that is killed during a step and started again, with or without its append-only file."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.buffer.embedded_redis import EmbeddedRedis
from tests.faults.network import SETTINGS, fault_at
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, orchestrator
from tests.waiting import LIMIT

DOWN = 0.3
"""Seconds until the restart."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A separate Redis for one run."""
    with EmbeddedRedis(tmp_path / "data", tmp_path / "redis.log") as started:
        yield started


@pytest.mark.parametrize(("moment", "keeps_data"), [("generate", True), ("commit", False)])
def test_a_run_whose_redis_is_killed_and_restarted_stays_bit_identical(
    moment: str,
    keeps_data: bool,
    server: EmbeddedRedis,
    tmp_path: Path,
    make: MakeConfig,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[threading.Timer] = []

    def restart() -> None:
        if not keeps_data:
            shutil.rmtree(tmp_path / "data")
        server.start()

    def kill() -> None:
        server.process.kill()
        server.process.wait()
        timers.append(threading.Timer(DOWN, restart))
        timers[0].start()

    config = make(**SETTINGS, buffer={"url": server.url})
    with fleet(config) as services, fault_at(moment, kill, monkeypatch), orchestrator(services.config) as active:
        run = active.finish()
    timers[0].join(LIMIT)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1
