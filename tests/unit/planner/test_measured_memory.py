"""The planned memory of an update, compared with the measured peak of a process: within 10 %."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_cases import Case

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak memory is read from /proc")
SMALL = Case("llama", 256, 4, 4096, responses=16, prompt=32, response=96, tokens=512)
LARGE = [
    Case("llama", 512, 8, 8192, tokens=1024),
    Case("llama", 512, 8, 8192, tokens=1024, checkpointing=True),
    Case("gpt2", 512, 6, 8192, role="critic", tokens=1024),
    Case("qwen2", 512, 6, 32_000, dtype="bfloat16", tokens=1024),
    Case("llama", 768, 6, 8192, rank=8, tokens=1024),
]


def check(case: Case) -> None:
    assert case.predicted_bytes() == pytest.approx(case.measured_bytes(), rel=0.1)


def test_the_planned_memory_of_an_update_is_within_a_tenth_of_the_measured_peak() -> None:
    check(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.role} {case.name}")
def test_the_planned_memory_of_larger_updates_is_within_a_tenth_of_the_measured_peak(case: Case) -> None:
    check(case)
