"""What the benchmarks of durability make of their measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import durability, page, soak
from benchmarks.durability import cost_of, logged_seconds
from benchmarks.soak import KIB, Sample, faults_of, rows_of
from quartet.types import Role


def samples(leak: int = 0, files: int = 0, redis: int = 0) -> list[Sample]:
    """1,000 steps, five a second. ``leak``, ``redis``: bytes a step; ``files``: left open in all, after half of the run."""
    return [
        Sample(
            step,
            step / 5,
            # Memory that comes with the warm-up and then sways is no leak.
            {"actor": 10_000_000 + 50_000 * min(step, 150) + 5_000 * (step % 2) + leak * step},
            {"actor": 12 + (files if step > 500 else 0)},
            1_000_000 + 20_000 * (step % 50) + redis * step,
        )
        for step in range(1, 1001, 5)
    ]


def test_memory_that_sways_is_flat_and_a_slope_is_what_is_leaked() -> None:
    actor, redis = rows_of(samples(), 1000)
    assert (actor.name, redis.name) == ("actor", "redis, used_memory")
    assert abs(actor.slope) < 1
    assert abs(redis.slope) < 30
    assert faults_of([actor, redis], bound=30) == []
    actor, redis = rows_of(samples(leak=1024, redis=4096), 1000)
    assert actor.slope == pytest.approx(100, abs=1)
    assert redis.slope == pytest.approx(400, abs=30)
    assert actor.mebibytes_last - actor.mebibytes_first == pytest.approx(720 * 1024 / KIB**2, abs=0.02)


def test_memory_that_is_given_back_for_a_moment_does_not_tilt_the_slope() -> None:
    steps = list(range(200, 1000, 4))
    values = [10_000 + 3 * step - (5_000_000 if 300 < step < 400 else 0) for step in steps]
    assert soak.slope(steps, values) == pytest.approx(3)


def test_a_leak_and_files_that_stay_open_are_faults_with_the_name_of_the_process() -> None:
    [leak] = faults_of(rows_of(samples(leak=1024), 1000), bound=80)
    assert leak == "actor: memory rises by 100 KiB per 100 steps, at most 80 are allowed"
    [files] = faults_of(rows_of(samples(files=1), 1000), bound=80)
    assert files == "actor: had 12 open files, has 13"
    [redis] = faults_of(rows_of(samples(redis=4096), 1000), bound=80)
    assert redis.startswith("redis, used_memory: memory rises by")


LINE = (
    "timestamp='2026-01-01' level='info' role='orchestrator' event='committed' step={step} seconds={seconds} "
    "seconds_seal=0.004 seconds_lease=0.001 seconds_commit=2e-3 seconds_acknowledge=0.001 seconds_checkpoint={wait}"
)


def test_the_cost_is_that_of_each_step_and_of_checkpoints_as_often_as_the_config_has_them() -> None:
    def line(step: int) -> str:
        after = step % 10 == 1 and step > 1
        return LINE.format(step=step, seconds=2.3 if after else 9.0 if step == 1 else 2.0, wait=0.05 if after else 0.0)

    log = "\n".join(text for step in range(1, 31) for text in (line(step), f"event='step' step={step} seconds=1.0"))
    cost = cost_of(logged_seconds(log), {Role.ACTOR: 0.02, Role.CRITIC: 0.04}, measured_every=10, every=50)
    assert cost.step == 2.0
    assert cost.parts == {"seal": 0.004, "lease": 0.001, "commit": 0.002, "acknowledge": 0.001}
    assert (cost.copies, cost.waits) == (0.04, pytest.approx(0.05))
    assert cost.slower == pytest.approx(0.3)
    assert cost.checkpoint == pytest.approx(0.3)
    assert cost.share == pytest.approx((0.008 + 0.3 / 50) / 2.0)
    assert "| together | 14.00 | 0.700 % |" in durability.table(cost, Path("ppo.yaml"), 30)


def test_a_benchmark_writes_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"above\n{page.begin('soak')}\nold\n{page.end('soak')}\nbelow\n")
    page.write(path, "soak", soak.table(rows_of(samples(), 1000), 1000, 200.0, 24_000, 30.0, []))
    text = path.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert "memory and open files stay flat" in text
    page.write(path, "soak", "new")
    assert path.read_text() == f"above\n{page.begin('soak')}\n\nnew\n\n{page.end('soak')}\nbelow\n"
    with pytest.raises(ValueError, match="lost a mark"):
        page.write(path, "cost", "new")
