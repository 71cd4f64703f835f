"""A Redis that is killed in the middle of a step and started again, with what it had or with nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.buffer.embedded_redis import EmbeddedRedis
from tests.faults.network import MOMENTS, SHORT, struck
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, orchestrator

DOWN = 0.3
"""Seconds until it is started again."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A separate Redis for one run."""
    with EmbeddedRedis(tmp_path / "data", tmp_path / "redis.log") as started:
        yield started


@pytest.mark.parametrize("keeps", [True, False], ids=["with its append-only file", "with nothing"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.sampled(5)
def test_a_run_whose_redis_is_killed_and_restarted_stays_bit_identical(
    moment: str,
    keeps: bool,
    server: EmbeddedRedis,
    tmp_path: Path,
    make: MakeConfig,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    back: list[threading.Timer] = []

    def start_again() -> None:
        if not keeps:
            shutil.rmtree(tmp_path / "data")
        server.start()

    def kill() -> None:
        server.process.kill()
        server.process.wait()
        back.append(threading.Timer(DOWN, start_again))
        back[0].start()

    config = make(**SHORT, buffer={"url": server.url})
    with fleet(config) as services, struck(moment, kill, monkeypatch), orchestrator(services.config) as going:
        run = going.finish()
    back[0].join(20)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1
